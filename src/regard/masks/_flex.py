"""To and from FlexAttention: a mask program becomes a `mask_mod` of pointwise tensor operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import Offset, common_shape, describe
from ._atoms import Blocks, Dense
from ._mask import Mask
from ._program import UNLIMITED, Op, Program
from ._random import chosen_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _Scene(NamedTuple):
    """What the builders need to know: the program's tensors, and where the queries can stand."""

    tensors: list[Tensor]  # each (1 or B, *core)
    Lk: int
    offset: int | Tensor
    lowest: int
    highest: int
    device: torch.device

    def position(self, b: Tensor, q: Tensor) -> Tensor:
        return q + (_pick(self.offset, b) if isinstance(self.offset, Tensor) else self.offset)


def to_flex_mask_mod(
    mask: Mask,
    Lq: int,
    Lk: int,
    offset: Offset = None,
    *,
    batch: tuple[int, ...] | None = None,
    device: torch.device | str | None = None,
) -> Mod:
    """A `mask_mod(b, h, q_idx, kv_idx)` for FlexAttention: True = may attend.

    It is made of pointwise operations and indexing on `device` (the mask's own by default). With several
    batch dimensions give `batch`, and b counts through all of them.
    """
    where = mask.device if device is None else torch.device(device)
    program = mask.lower()
    tensors = program.bind(_batch(program) if batch is None else batch)
    return _build(list(program.code), _scene([t.to(where) for t in tensors], Lq, Lk, offset, where))


def to_flex(
    mask: Mask,
    Lq: int,
    Lk: int,
    offset: Offset = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    block: int = 128,
    device: torch.device | str | None = None,
) -> BlockMask:
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


def _scene(tensors: list[Tensor], Lq: int, Lk: int, offset: Offset, device: torch.device) -> _Scene:
    if isinstance(offset, Tensor):
        start: int | Tensor = offset.to(device, torch.int64).reshape(-1)
        first, last = int(offset.min()), int(offset.max())
    else:
        start = first = last = Lk - Lq if offset is None else offset
    return _Scene(tensors, Lk, start, first, max(first, last + Lq - 1), device)


def _batch(program: Program) -> tuple[int, ...]:
    """The batch dims that the mask's tensors have."""
    pairs = zip(program.tensors, program.cores, strict=True)
    return common_shape(*(tensor.shape[: tensor.ndim - core] for tensor, core in pairs))


def _pick(tensor: Tensor, *index: Tensor) -> Tensor:
    """Index with broadcasting: a dimension of size 1 is read at 0."""
    return tensor[tuple(x if n > 1 else x * 0 for x, n in zip(index, tensor.shape, strict=True))]


def _pick_inside(tensor: Tensor, b: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """`tensor[b, at]` and whether `at` lies inside it."""
    inside = (at >= 0) & (at < tensor.shape[1])
    return _pick(tensor, b, torch.where(inside, at, 0)), inside


def _build(code: list[int], scene: _Scene) -> Mod:
    op, arguments = Op(code[0]), code[2:]
    return _BUILDERS[op](arguments, scene)


def _children(code: list[int], scene: _Scene) -> Iterator[Mod]:
    while code:
        yield _build(code[: code[1]], scene)
        code = code[code[1] :]


def _window(arguments: list[int], scene: _Scene) -> Mod:
    left, right = arguments

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        pos = scene.position(b, q)
        seen = k == k
        seen = seen & (pos - left <= k) if left < UNLIMITED else seen
        return seen & (k <= pos + right) if right < UNLIMITED else seen & (q == q)

    return mod


def _lengths(arguments: list[int], scene: _Scene) -> Mod:
    n = scene.tensors[arguments[0]]
    return lambda b, h, q, k: k < _pick(n, b)


def _documents(arguments: list[int], scene: _Scene) -> Mod:
    q_ids, k_ids = (scene.tensors[t] for t in arguments)
    return lambda b, h, q, k: _pick(q_ids, b, q) == _pick(k_ids, b, k)


def _tokens(arguments: list[int], scene: _Scene) -> Mod:
    ids = scene.tensors[arguments[0]]

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own, inside = _pick_inside(ids, b, scene.position(b, q))
        return inside & (own == _pick(ids, b, k))

    return mod


def _prefix(arguments: list[int], scene: _Scene) -> Mod:
    return lambda b, h, q, k: k < arguments[0]


def _global(arguments: list[int], scene: _Scene) -> Mod:
    tokens = scene.tensors[arguments[0]]
    size = max(scene.Lk, scene.highest + 1, 1)
    # Tokens that are padding or beyond every position fall into one more column, which is cut off.
    at = torch.where((tokens >= 0) & (tokens < size), tokens, size)
    marks = torch.zeros(len(tokens), size + 1, dtype=torch.bool, device=scene.device)
    marks = marks.scatter(1, at, True)[:, :size].contiguous()

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        marked, inside = _pick_inside(marks, b, scene.position(b, q))
        return (marked & inside) | _pick(marks, b, k)

    return mod


def _random(arguments: list[int], scene: _Scene) -> Mod:
    per_row, block, seed = arguments
    first = scene.lowest // block
    rows = torch.arange(first, scene.highest // block + 1, device=scene.device)
    table = chosen_blocks(rows, -(-scene.Lk // block), per_row, seed)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        line = torch.div(scene.position(b, q), block, rounding_mode="floor") - first
        return _pick(table, line, torch.div(k, block, rounding_mode="floor"))

    return mod


def _dilated(arguments: list[int], scene: _Scene) -> Mod:
    return lambda b, h, q, k: (scene.position(b, q) - k) % arguments[0] == 0


def _dense(arguments: list[int], scene: _Scene) -> Mod:
    keep = scene.tensors[arguments[0]]
    return lambda b, h, q, k: _pick(keep, b, h, q, k)


def _blocks(arguments: list[int], scene: _Scene) -> Mod:
    table, block = scene.tensors[arguments[0]], arguments[1]

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        line, place = (torch.div(x, block, rounding_mode="floor") for x in (q, k))
        return _pick(table, b, h, line, place)

    return mod


def _per_head(arguments: list[int], scene: _Scene) -> Mod:
    mods = list(_children(arguments, scene))

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return reduce(torch.logical_or, ((h == n) & one(b, h, q, k) for n, one in enumerate(mods)))

    return mod


def _and(arguments: list[int], scene: _Scene) -> Mod:
    mods = list(_children(arguments, scene))
    return lambda b, h, q, k: reduce(torch.logical_and, (mod(b, h, q, k) for mod in mods))


def _or(arguments: list[int], scene: _Scene) -> Mod:
    mods = list(_children(arguments, scene))
    return lambda b, h, q, k: reduce(torch.logical_or, (mod(b, h, q, k) for mod in mods))


def _not(arguments: list[int], scene: _Scene) -> Mod:
    (inner,) = _children(arguments, scene)
    return lambda b, h, q, k: ~inner(b, h, q, k)


_BUILDERS: dict[Op, Callable[[list[int], _Scene], Mod]] = {
    Op.WINDOW: _window,
    Op.LENGTHS: _lengths,
    Op.DOCUMENTS: _documents,
    Op.TOKENS: _tokens,
    Op.PREFIX: _prefix,
    Op.GLOBAL: _global,
    Op.RANDOM: _random,
    Op.DILATED: _dilated,
    Op.DENSE: _dense,
    Op.BLOCKS: _blocks,
    Op.PERHEAD: _per_head,
    Op.AND: _and,
    Op.OR: _or,
    Op.NOT: _not,
}


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
