"""To and from FlexAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._tools.arguments import Offset, common_shape, describe
from ._atoms import Blocks, Dense
from ._mask import Mask, decode
from ._pairs import Mod, Scene
from ._program import Program

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def to_flex_mask_mod(
    mask: Mask, Lq: int, Lk: int, offset: Offset = None, *, batch: tuple[int, ...] | None = None,
    device: torch.device | str | None = None,
) -> Mod:  # fmt: skip
    """A `mask_mod(b, h, q_idx, kv_idx)` for FlexAttention: True = may attend.

    It is made of pointwise operations and indexing on `device` (the mask's own by default). With several
    batch dimensions give `batch`, and b counts through all of them.
    """
    where = mask.device if device is None else torch.device(device)
    program = mask.lower()
    tensors = program.bind(_batch(program) if batch is None else batch)
    bound = decode(program.code, [t.to(where) for t in tensors])
    return bound._mod(_scene(Lq, Lk, offset, where))


def to_flex(
    mask: Mask, Lq: int, Lk: int, offset: Offset = None, *, batch: int | None = None,
    heads: int | None = None, block: int = 128, device: torch.device | str | None = None,
) -> BlockMask:  # fmt: skip
    """A FlexAttention BlockMask. Give `batch` and `heads` if the mask differs between samples or heads."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask.check(() if batch is None else (batch,), 1 if heads is None else heads, Lq, Lk, offset)
    if batch is None and isinstance(offset, Tensor) and offset.numel() > 1:
        raise ValueError(f"give `batch` with an offset for each sample, got {describe(offset)}")
    mod = to_flex_mask_mod(mask, Lq, Lk, offset, device=device)
    where = device if device is not None else mask.device
    return create_block_mask(mod, batch, heads, Lq, Lk, device=where, BLOCK_SIZE=block)


def from_flex(block_mask: BlockMask) -> Mask:
    """From a FlexAttention BlockMask, exactly: Blocks if its blocks are all or nothing, else Dense."""
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    Lq, Lk = block_mask.seq_lengths
    rows, columns = block_mask.BLOCK_SIZE
    partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices, -(-Lk // columns))
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, -(-Lk // columns))
    if block_mask.mask_mod is noop_mask and rows == columns:
        return Blocks(_trim(partial | full), rows)
    B, H = partial.shape[:2]
    inside = create_mask(block_mask.mask_mod, B, H, Lq, Lk, device=partial.device)
    some, all_ = (_spread(table, rows, columns, Lq, Lk) for table in (partial, full))
    keep = all_ | (some & inside)
    if rows == columns and torch.equal(keep, some | all_):
        return Blocks(_trim(partial | full), rows)
    return Dense(_trim(keep))


def _scene(Lq: int, Lk: int, offset: Offset, device: torch.device) -> Scene:
    if isinstance(offset, Tensor):
        start: int | Tensor = offset.to(device, torch.int64).reshape(-1)
        first, last = int(offset.min()), int(offset.max())
    else:
        start = first = last = Lk - Lq if offset is None else offset
    return Scene(Lk, start, first, max(first, last + Lq - 1), device)


def _batch(program: Program) -> tuple[int, ...]:
    """The batch dims that the mask's tensors have."""
    pairs = zip(program.tensors, program.cores, strict=True)
    return common_shape(*(tensor.shape[: tensor.ndim - core] for tensor, core in pairs))


def _table(numbers: Tensor, indices: Tensor, columns: int) -> Tensor:
    """(B, H, nq) counts and (B, H, nq, m) block numbers -> bool (B, H, nq, columns)."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < numbers[..., None]
    at = torch.where(valid, indices.long(), columns)
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter(-1, at, True)[..., :columns]


def _spread(table: Tensor, rows: int, columns: int, Lq: int, Lk: int) -> Tensor:
    return table.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :Lq, :Lk]


def _trim(matrix: Tensor) -> Tensor:
    """Drop the batch dim, and the head dim, of (B, H, Lq, Lk) if it is 1."""
    while matrix.ndim > 2 and matrix.shape[0] == 1:
        matrix = matrix[0]
    return matrix
