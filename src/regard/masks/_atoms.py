"""The atoms: each says one thing about which keys a query may attend to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .._tools.arguments import (
    bool_tensor,
    brief,
    broadcasts,
    common_shape,
    count,
    describe,
    int_tensor,
    is_integer,
    readable,
)
from ._mask import Grid, Mask, Sizes, column, row, value
from ._program import UNLIMITED, Op, Pool, node
from ._random import chosen_blocks, signed


@value
class Causal(Mask):
    """Keys at or before the query's position."""

    _cost: ClassVar[int] = 0

    def __init__(self) -> None: ...

    def _dense(self, grid: Grid) -> Tensor:
        return grid.j <= grid.p

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.WINDOW, UNLIMITED, 0)


@value
class Window(Mask):
    """Keys up to `left` before and `right` after the query's position; None means unlimited."""

    _cost: ClassVar[int] = 0
    left: int | None
    right: int | None

    def __init__(self, left: int | None, right: int | None = 0) -> None:
        self._set(left=_reach("left", left), right=_reach("right", right))

    def _dense(self, grid: Grid) -> Tensor:
        seen = torch.ones_like(grid.j <= grid.p)
        if self.left is not None:
            seen &= grid.p - self.left <= grid.j
        if self.right is not None:
            seen &= grid.j <= grid.p + self.right
        return seen

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.WINDOW, *(UNLIMITED if reach is None else reach for reach in (self.left, self.right)))


def _reach(name: str, reach: int | None) -> int | None:
    return None if reach is None else count(f"Window({name})", reach)


@value
class Lengths(Mask):
    """The first n keys of each sample are real. `n` is an int, or integers of the batch's shape, (B,)."""

    _cost: ClassVar[int] = 0
    n: Tensor

    def __init__(self, n: int | Sequence[int] | Tensor) -> None:
        n = int_tensor("Lengths(n)", n, 0)
        if readable(n) and n.numel() and int(n.min()) < 0:
            raise ValueError(f"Lengths(n) must not be negative, got {int(n.min())}")
        self._set(n=n)

    @functools.cached_property
    def _longest(self) -> int:
        return int(self.n.max()) if readable(self.n) and self.n.numel() else 0

    def _check(self, sizes: Sizes) -> None:
        if not sizes.batch_fits(tuple(self.n.shape)):
            shape = tuple(self.n.shape)
            raise ValueError(f"Lengths(n): shape {shape} does not broadcast to the batch {sizes.batch}")

    def _dense(self, grid: Grid) -> Tensor:
        return grid.j < (self.n[..., None, None, None] if self.n.ndim else self.n)

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.LENGTHS, pool.add(self.n, 0))


@value
class Documents(Mask):
    """Tokens see the tokens that have the same id.

    With two tensors, (..., Lq) and (..., Lk), they are the ids of the queries and of the keys. With one,
    (..., Lk), it gives the ids by position: query i is token offset + i; outside the tokens it sees nothing.
    """

    q_ids: Tensor
    k_ids: Tensor | None

    def __init__(self, q_ids: Tensor | Sequence[int], k_ids: Tensor | Sequence[int] | None = None) -> None:
        keys = None if k_ids is None else int_tensor("Documents(k_ids)", k_ids, 1)
        self._set(q_ids=int_tensor("Documents(q_ids)", q_ids, 1), k_ids=keys)

    def __repr__(self) -> str:
        ids = [self.q_ids] if self.k_ids is None else [self.q_ids, self.k_ids]
        return f"Documents({', '.join(map(brief, ids))})"

    def _sizes(self) -> tuple[int, int]:
        own = self.q_ids.shape[-1]
        return (0, own) if self.k_ids is None else (own, self.k_ids.shape[-1])

    def _check(self, sizes: Sizes) -> None:
        if self.k_ids is None:
            _check_ids("q_ids", self.q_ids, "Lk", sizes.Lk, sizes)
        else:
            _check_ids("q_ids", self.q_ids, "Lq", sizes.Lq, sizes)
            _check_ids("k_ids", self.k_ids, "Lk", sizes.Lk, sizes)

    def _dense(self, grid: Grid) -> Tensor:
        if self.k_ids is not None:
            return column(self.q_ids) == row(self.k_ids)
        ids, L = self.q_ids, self.q_ids.shape[-1]
        inside = (grid.pos >= 0) & (grid.pos < L)
        lead = common_shape(ids.shape[:-1], grid.pos.shape[:-1])
        # One more column for the positions outside, so that there is something to gather.
        padded = torch.nn.functional.pad(ids, (0, 1)).expand(*lead, L + 1)
        at = torch.where(inside, grid.pos, L).expand(*lead, -1)
        return (column(padded.gather(-1, at)) == row(ids)) & column(inside)

    def _encode(self, pool: Pool) -> list[int]:
        if self.k_ids is None:
            return node(Op.TOKENS, pool.add(self.q_ids, 1))
        return node(Op.DOCUMENTS, pool.add(self.q_ids, 1), pool.add(self.k_ids, 1))


def _check_ids(name: str, ids: Tensor, letter: str, length: int, sizes: Sizes) -> None:
    if ids.shape[-1] != length or not sizes.batch_fits(tuple(ids.shape[:-1])):
        raise ValueError(
            f"Documents({name}): shape {tuple(ids.shape)} is not (..., {letter}) for batch {sizes.batch}, "
            f"Lq = {sizes.Lq}, Lk = {sizes.Lk}"
        )


@value
class Prefix(Mask):
    """Every query sees the keys j < n. For one number per sample use Lengths."""

    _cost: ClassVar[int] = 0
    n: int

    def __init__(self, n: int) -> None:
        self._set(n=count("Prefix(n)", n))

    def _dense(self, grid: Grid) -> Tensor:
        return (grid.j < self.n) & torch.ones_like(grid.i, dtype=torch.bool)

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.PREFIX, self.n)


@value
class Global(Mask):
    """The tokens at these positions see all keys and are seen by all queries.

    `tokens` are positions (n,), or for each sample (..., n) padded with -1; or a bool tensor (..., L) that
    marks them. They are kept in ascending order, without repeats, padding in front.
    """

    tokens: Tensor

    def __init__(self, tokens: Sequence[int] | Tensor) -> None:
        self._set(tokens=_ascending(_positions(tokens)))

    def _check(self, sizes: Sizes) -> None:
        if not sizes.batch_fits(tuple(self.tokens.shape[:-1])):
            raise ValueError(
                f"Global(tokens): shape {tuple(self.tokens.shape)} is not (..., n) for batch {sizes.batch}"
            )

    def _dense(self, grid: Grid) -> Tensor:
        queries = _among(grid.pos, self.tokens)
        return column(queries) | row(_among(grid.key, self.tokens))

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.GLOBAL, pool.add(self.tokens, 1))


def _positions(tokens: Sequence[int] | Tensor) -> Tensor:
    if isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
        marks = bool_tensor("Global(tokens)", tokens, 1)
        return torch.where(marks, torch.arange(marks.shape[-1], device=marks.device), -1)
    positions = int_tensor("Global(tokens)", tokens, 1)
    if readable(positions) and positions.numel() and int(positions.min()) < -1:
        raise ValueError(
            f"Global(tokens) must be positions >= 0, or -1 for padding, got {int(positions.min())}"
        )
    return positions


def _ascending(tokens: Tensor) -> Tensor:
    tokens = tokens.sort(-1).values
    repeats = torch.nn.functional.pad(tokens[..., 1:] == tokens[..., :-1], (1, 0))[..., : tokens.shape[-1]]
    tokens = tokens.masked_fill(repeats, -1).sort(-1).values
    if not readable(tokens):
        return tokens.contiguous()
    padding = int((tokens < 0).sum(-1).min()) if tokens.numel() else 0
    return tokens[..., padding:].contiguous()


def _among(positions: Tensor, tokens: Tensor) -> Tensor:
    """(..., L) and (..., n) -> bool (..., L); padding is nowhere."""
    return ((positions[..., :, None] == tokens[..., None, :]) & (tokens >= 0)[..., None, :]).any(-1)


@value
class RandomBlocks(Mask):
    """Each block of `block` query positions sees `per_row` key blocks drawn at random.

    The draw depends on the seed, the row and the number of key blocks only: the same on every machine.
    """

    _cost: ClassVar[int] = 2
    per_row: int
    block: int
    seed: int

    def __init__(self, per_row: int, block: int, seed: int = 0) -> None:
        self._set(
            per_row=count("RandomBlocks(per_row)", per_row, 1),
            block=count("RandomBlocks(block)", block, 1),
            seed=_seed(seed),
        )

    def _dense(self, grid: Grid) -> Tensor:
        rows, which = torch.unique(grid.pos.div(self.block, rounding_mode="floor"), return_inverse=True)
        table = chosen_blocks(rows, -(-grid.Lk // self.block), self.per_row, self.seed)
        seen = table[which][..., grid.key // self.block]
        return seen.unsqueeze(-3) if seen.ndim > 2 else seen

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.RANDOM, self.per_row, self.block, signed(self.seed))


def _seed(seed: int) -> int:
    if not is_integer(seed):
        raise TypeError(f"RandomBlocks(seed) must be an int, got {describe(seed)}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"RandomBlocks(seed) must fit in 64 bits, got {seed}")
    return int(seed)


@value
class Dilated(Mask):
    """Keys whose distance from the query's position is a multiple of `step`."""

    _cost: ClassVar[int] = 2
    step: int

    def __init__(self, step: int) -> None:
        self._set(step=count("Dilated(step)", step, 1))

    def _dense(self, grid: Grid) -> Tensor:
        return (grid.p - grid.j) % self.step == 0

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.DILATED, self.step)


@value
class Dense(Mask):
    """A bool tensor, broadcastable to (..., Hq, Lq, Lk); True means "may attend".

    It is indexed by query and key number, not by position. Three dimensions are (Hq, Lq, Lk);
    a mask for each sample is (B, 1, Lq, Lk).
    """

    _cost: ClassVar[int] = 2
    keep: Tensor

    def __init__(self, keep: Tensor) -> None:
        self._set(keep=bool_tensor("Dense(keep)", keep, 2))

    @classmethod
    def borrow(cls, keep: Tensor) -> Dense:
        """A Dense that does not own its tensor: for a single call, which does not outlive it."""
        mask = cls.__new__(cls)
        mask._set(keep=keep)
        return mask

    def _sizes(self) -> tuple[int, int]:
        Lq, Lk = self.keep.shape[-2:]
        return Lq if Lq > 1 else 0, Lk if Lk > 1 else 0

    def _check(self, sizes: Sizes) -> None:
        _check_matrix("Dense(keep)", self.keep, sizes, sizes.Lq, sizes.Lk, broadcast=True)

    def _dense(self, grid: Grid) -> Tensor:
        return self.keep

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.DENSE, pool.add(_with_heads(self.keep), 3))


@value
class Blocks(Mask):
    """A bool table (..., Hq, ceil(Lq / block), ceil(Lk / block)) over squares of `block` queries and keys.

    It is laid over the queries and keys by number, not by position.
    """

    table: Tensor
    block: int

    def __init__(self, table: Tensor, block: int) -> None:
        self._set(table=bool_tensor("Blocks(table)", table, 2), block=count("Blocks(block)", block, 1))

    def _sizes(self) -> tuple[int, int]:
        nq, nk = self.table.shape[-2:]
        return nq * self.block, nk * self.block

    def _check(self, sizes: Sizes) -> None:
        nq, nk = -(-sizes.Lq // self.block), -(-sizes.Lk // self.block)
        _check_matrix(f"Blocks(table, block={self.block})", self.table, sizes, nq, nk, broadcast=False)

    def _dense(self, grid: Grid) -> Tensor:
        return self.table[..., grid.i // self.block, grid.j // self.block]

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.BLOCKS, pool.add(_with_heads(self.table), 3), self.block)


def _with_heads(matrix: Tensor) -> Tensor:
    return matrix if matrix.ndim > 2 else matrix[None]


def _check_matrix(name: str, matrix: Tensor, sizes: Sizes, rows: int, columns: int, broadcast: bool) -> None:
    shape = tuple(matrix.shape)
    exact = broadcast or shape[-2:] == (rows, columns)
    heads = (*shape[-3:-2], 1)[0] if sizes.heads is None else sizes.heads
    if not exact or not broadcasts(shape[-3:], (heads, rows, columns)) or not sizes.batch_fits(shape[:-3]):
        wanted = f"(batch {sizes.batch}, Hq = {sizes.heads}, {rows}, {columns})"
        raise ValueError(
            f"{name}: shape {shape} does not broadcast to {wanted} for Lq = {sizes.Lq}, Lk = {sizes.Lk}; "
            "the third dimension from the right is the heads, batch dimensions come before it"
        )
