"""Conversion of masks from and to FlexAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._tools.arguments import Offset, common_shape, describe, readable
from ._atoms import BlockPatterns, Blocks, Dense
from ._mask import Mask, decode
from ._pairs import FlexCall, Mod
from ._program import Program

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PAIRS = 2**22  # the most (query, key) pairs for which a mask_mod is evaluated at once


def to_flex_mask_mod(
    mask: Mask, Lq: int, Lk: int, offset: Offset = None, *, batch: tuple[int, ...] | None = None,
    device: torch.device | str | None = None,
) -> Mod:  # fmt: skip
    """Converts a mask to a FlexAttention `mask_mod(b, h, q_idx, kv_idx)`; True = may attend.

    Args:
        Lq, Lk, offset: as in `Mask.to_dense`.
        batch: the batch shape. Required with several batch dims; b is then the flattened index.
        device: the device on which the function runs. Default: the device of the mask's tensors.
    """
    target = mask.device if device is None else torch.device(device)
    program = mask.lower()
    tensors = program.bind(_batch(program) if batch is None else batch)
    bound = decode(program.code, [t.to(target) for t in tensors])
    return bound._mod(_flex_call(Lq, Lk, offset, target))


def to_flex(
    mask: Mask, Lq: int, Lk: int, offset: Offset = None, *, batch: int | None = None,
    heads: int | None = None, block: int = 128, device: torch.device | str | None = None,
) -> BlockMask:  # fmt: skip
    """Converts a mask to a FlexAttention BlockMask.

    Args:
        Lq, Lk, offset: as in `Mask.to_dense`.
        batch, heads: B and Hq. Required if the mask differs between samples or heads.
        block: tokens per block of the BlockMask.
        device: the device of the BlockMask. Default: the device of the mask's tensors.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    mask.check(() if batch is None else (batch,), 1 if heads is None else heads, Lq, Lk, offset)
    if batch is None and isinstance(offset, Tensor) and offset.numel() > 1:
        raise ValueError(f"batch: expected B with an offset for each sample, got None and {describe(offset)}")
    mod = to_flex_mask_mod(mask, Lq, Lk, offset, device=device)
    target = device if device is not None else mask.device
    return create_block_mask(mod, batch, heads, Lq, Lk, device=target, BLOCK_SIZE=block)


def from_flex(block_mask: BlockMask) -> Mask:
    """Converts a FlexAttention BlockMask to `Blocks` if no block is partial, else `BlockPatterns`.

    The mask_mod is evaluated once for each pair of the partial blocks. If the values of tensors
    cannot be read, as under torch.compile, the mask_mod is evaluated for all pairs instead, and the
    result is a `Dense` mask.
    """
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    (Lq, Lk), (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices, -(-Lk // columns))
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, -(-Lk // columns))
    if block_mask.mask_mod is noop_mask:
        partial, full = torch.zeros_like(partial), partial | full
    if not readable(partial):
        B, H = partial.shape[:2]
        inside = create_mask(block_mask.mask_mod, B, H, Lq, Lk, device=partial.device)
        in_partial, in_full = (_expand(table, rows, columns, Lq, Lk) for table in (partial, full))
        return Dense(_trim(in_full | (in_partial & inside)))
    table, patterns = _patterns(block_mask, partial, full)
    if len(patterns) == 2 and rows == columns:
        return Blocks(_trim(table == 1), rows)
    return BlockPatterns(_trim(table), patterns)


def _patterns(block_mask: BlockMask, partial: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the table and the patterns of `BlockPatterns`.

    `partial` (B, H, query blocks, key blocks) is True for blocks that are allowed in part. `full`,
    of the same shape, is True for blocks that are allowed completely.
    """
    rows, columns = block_mask.BLOCK_SIZE
    blocks = partial.nonzero()
    steps = max(1, PAIRS // (rows * columns))
    bits = [_evaluate(block_mask, part) for part in blocks.split(steps)] if len(blocks) else []
    none = torch.zeros(1, rows, columns, dtype=torch.bool, device=partial.device)
    # Sorted: the first pattern is all False and the last all True.
    distinct, index = torch.unique(torch.cat([none, ~none, *bits]), dim=0, return_inverse=True)
    last = len(distinct) - 1
    index = torch.where(index == last, 1, torch.where(index == 0, 0, index + 1))
    table = full.long()
    table[partial] = index[2:]
    return table, torch.cat([distinct[:1], distinct[last:], distinct[1:last]])


def _evaluate(block_mask: BlockMask, blocks: Tensor) -> Tensor:
    """Evaluates the mask_mod in n blocks: bool (n, rows, columns), True = may attend.

    A row of `blocks` (n, 4) has the indices of a block: sample, head, query block, key block.
    Indices beyond the last query or key are clamped to it.
    """
    from torch.nn.attention.flex_attention import create_mask

    (Lq, Lk), (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    b, h, first_q, first_k = (blocks * blocks.new_tensor([1, 1, rows, columns])).unbind(1)

    def mod(n: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q, k = (first_q[n] + i).clamp(max=Lq - 1), (first_k[n] + j).clamp(max=Lk - 1)
        return block_mask.mask_mod(b[n], h[n], q, k)

    return create_mask(mod, len(blocks), 1, rows, columns, device=blocks.device).squeeze(1)


def _flex_call(Lq: int, Lk: int, offset: Offset, device: torch.device) -> FlexCall:
    if isinstance(offset, Tensor):
        start: int | Tensor = offset.to(device, torch.int64).reshape(-1)
        first, last = int(offset.min()), int(offset.max())
    else:
        start = first = last = Lk - Lq if offset is None else offset
    return FlexCall(Lk, start, first, max(first, last + Lq - 1), device)


def _batch(program: Program) -> tuple[int, ...]:
    """Returns the common batch shape of the mask's tensors."""
    pairs = zip(program.tensors, program.cores, strict=True)
    return common_shape(*(tensor.shape[: tensor.ndim - core] for tensor, core in pairs))


def _table(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Converts the key blocks of each query block to a bool table (B, H, nq, columns).

    For each of nq query blocks, the first `counts` (B, H, nq) of `indices` (B, H, nq, m) are its
    key blocks.
    """
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    column = torch.where(valid, indices.long(), columns)
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter(-1, column, True)[..., :columns]


def _expand(table: Tensor, rows: int, columns: int, Lq: int, Lk: int) -> Tensor:
    return table.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :Lq, :Lk]


def _trim(matrix: Tensor) -> Tensor:
    """Removes both leading dims from (B, H, Lq, Lk) if their sizes are 1."""
    return matrix[0, 0] if matrix.shape[:2] == (1, 1) else matrix
