"""The atoms: each says one thing about which keys a query may attend to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from .._tools.arguments import bool_tensor, broadcasts, count, describe, int_tensor, is_integer, readable
from .._tools.values import value
from ._mask import CallSizes, Mask, MaskKind, declare
from ._pairs import At, Grid, Mod, Pair, Rectangle, Scene, column, cut, pick, row
from ._program import UNLIMITED, Op, Pool, node
from ._random import chosen_blocks, signed


@declare(Op.WINDOW, kind=MaskKind.DISTANCE, cost=0)
class Window(Mask):
    """Keys up to `left` before and `right` after the query's position; None means unlimited."""

    left: int | None
    right: int | None

    def __init__(self, left: int | None, right: int | None = 0) -> None:
        self._set(left=_reach("left", left), right=_reach("right", right))

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right})"

    def _sees(self, at: At) -> Tensor:
        if self.left is None:
            return at.j == at.j if self.right is None else at.j <= at.p + self.right
        seen = at.p - self.left <= at.j
        return seen if self.right is None else seen & (at.j <= at.p + self.right)

    def _joined(self, other: Mask) -> Mask | None:
        if not isinstance(other, Window):
            return None
        reaches = _nearer(self.left, other.left), _nearer(self.right, other.right)
        for window in (self, other):
            if (window.left, window.right) == reaches:
                return window
        return Window(*reaches)

    def _arguments(self, pool: Pool) -> list[int]:
        return [UNLIMITED if reach is None else reach for reach in (self.left, self.right)]

    @classmethod
    def _decode(cls, words: tuple[int, ...], tensors: Sequence[Tensor]) -> Self:
        return cls._of(*(None if reach == UNLIMITED else reach for reach in words))


@value
class Causal(Window):
    """Keys at or before the query's position."""

    left, right = None, 0

    def __init__(self) -> None: ...

    def __repr__(self) -> str:
        return "Causal()"


def _reach(name: str, reach: int | None) -> int | None:
    return None if reach is None else count(f"Window({name})", reach)


def _nearer(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


@declare(Op.LENGTHS, cost=0, n=0)
class Lengths(Mask):
    """The first n keys of each sample are real. `n` is an int, or integers of the batch's shape, (B,)."""

    n: Tensor

    def __init__(self, n: int | Sequence[int] | Tensor) -> None:
        n = int_tensor("Lengths(n)", n, 0)
        if readable(n) and n.numel() and int(n.min()) < 0:
            raise ValueError(f"Lengths(n) must not be negative, got {int(n.min())}")
        self._set(n=n)

    @functools.cached_property
    def _longest(self) -> int:
        return int(self.n.max()) if readable(self.n) and self.n.numel() else 0

    def _check(self, sizes: CallSizes) -> None:
        if not sizes.batch_fits(tuple(self.n.shape)):
            shape = tuple(self.n.shape)
            raise ValueError(f"Lengths(n): shape {shape} does not broadcast to the batch {sizes.batch}")

    def _sees(self, at: At) -> Tensor:
        return at.j < at.of_sample(self.n)


@declare(Op.DOCUMENTS, Op.TOKENS, q_ids=1, k_ids=1)
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

    def _sizes(self) -> tuple[int, int]:
        own = self.q_ids.shape[-1]
        return (0, own) if self.k_ids is None else (own, self.k_ids.shape[-1])

    def _check(self, sizes: CallSizes) -> None:
        if self.k_ids is None:
            _check_ids("q_ids", self.q_ids, "Lk", sizes.Lk, sizes)
        else:
            _check_ids("q_ids", self.q_ids, "Lq", sizes.Lq, sizes)
            _check_ids("k_ids", self.k_ids, "Lk", sizes.Lk, sizes)

    def _sees(self, at: At) -> Tensor:
        if self.k_ids is not None:
            return at.at_query(self.q_ids) == at.at_key(self.k_ids)
        own, inside = at.at_position(self.q_ids)
        return inside & (own == at.at_key(self.q_ids))

    def _encode(self, pool: Pool) -> list[int]:
        if self.k_ids is None:
            return node(Op.TOKENS, pool.add(self.q_ids, self._dims["q_ids"]))
        return super()._encode(pool)

    def _cut(self, part: Rectangle) -> Mask:
        if self.k_ids is None:
            return super()._cut(part)
        return self._of(cut(self.q_ids, part.samples, part.rows), cut(self.k_ids, part.samples))


def _check_ids(name: str, ids: Tensor, letter: str, length: int, sizes: CallSizes) -> None:
    if ids.shape[-1] != length or not sizes.batch_fits(tuple(ids.shape[:-1])):
        raise ValueError(
            f"Documents({name}): shape {tuple(ids.shape)} is not (..., {letter}) for batch {sizes.batch}, "
            f"Lq = {sizes.Lq}, Lk = {sizes.Lk}"
        )


@declare(Op.PREFIX, kind=MaskKind.POSITION, cost=0)
class Prefix(Mask):
    """Every query sees the keys j < n. For one number per sample use Lengths."""

    n: int

    def __init__(self, n: int) -> None:
        self._set(n=count("Prefix(n)", n))

    def _sees(self, at: At) -> Tensor:
        return at.j < self.n


@declare(Op.GLOBAL, kind=MaskKind.POSITION, tokens=1)
class Global(Mask):
    """The tokens at these positions see all keys and are seen by all queries.

    `tokens` are positions (n,), or for each sample (..., n) padded with -1; or a bool tensor (..., L) that
    marks them. They are kept in ascending order, without repeats, padding in front.
    """

    tokens: Tensor

    def __init__(self, tokens: Sequence[int] | Tensor) -> None:
        self._set(tokens=_ascending(_positions(tokens)))

    def _check(self, sizes: CallSizes) -> None:
        if not sizes.batch_fits(tuple(self.tokens.shape[:-1])):
            raise ValueError(
                f"Global(tokens): shape {tuple(self.tokens.shape)} is not (..., n) for batch {sizes.batch}"
            )

    def _dense(self, grid: Grid) -> Tensor:
        queries = _among(grid.pos, self.tokens)
        return column(queries) | row(_among(grid.j, self.tokens))

    def _mod(self, scene: Scene) -> Mod:
        tokens, size = self.tokens, max(scene.Lk, scene.highest + 1, 1)
        # Tokens that are padding or beyond every position fall into one more column, which is cut off.
        at = torch.where((tokens >= 0) & (tokens < size), tokens, size)
        marks = torch.zeros(len(tokens), size + 1, dtype=torch.bool, device=scene.device)
        marks = marks.scatter(1, at, True)[:, :size].contiguous()

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            pair = Pair(scene, b, h, q, k)
            marked, inside = pair.at_position(marks)
            return (marked & inside) | pair.at_key(marks)

        return mod


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


@declare(Op.RANDOM, kind=MaskKind.POSITION, cost=2)
class RandomBlocks(Mask):
    """Each block of `block` query positions sees `per_row` key blocks drawn at random.

    The draw depends on the seed, the row and the number of key blocks only: the same on every machine.
    """

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
        seen = self._table(rows, len(grid.j))[which][..., grid.j // self.block]
        return seen.unsqueeze(-3) if seen.ndim > 2 else seen

    def _mod(self, scene: Scene) -> Mod:
        first, last = scene.lowest // self.block, scene.highest // self.block
        table = self._table(torch.arange(first, last + 1, device=scene.device), scene.Lk)

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return pick(table, Pair(scene, b, h, q, k).p // self.block - first, k // self.block)

        return mod

    def _table(self, rows: Tensor, Lk: int) -> Tensor:
        """Bool (R, key blocks): those drawn for each of the block rows (R,)."""
        return chosen_blocks(rows, -(-Lk // self.block), self.per_row, self.seed)

    def _arguments(self, pool: Pool) -> list[int]:
        return [self.per_row, self.block, signed(self.seed)]


def _seed(seed: int) -> int:
    if not is_integer(seed):
        raise TypeError(f"RandomBlocks(seed) must be an int, got {describe(seed)}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"RandomBlocks(seed) must fit in 64 bits, got {seed}")
    return int(seed)


@declare(Op.DILATED, kind=MaskKind.DISTANCE, cost=2)
class Dilated(Mask):
    """Keys whose distance from the query's position is a multiple of `step`."""

    step: int

    def __init__(self, step: int) -> None:
        self._set(step=count("Dilated(step)", step, 1))

    def _sees(self, at: At) -> Tensor:
        return (at.p - at.j) % self.step == 0


@declare(Op.DENSE, cost=2, keep=3)
class Dense(Mask):
    """A bool tensor, broadcastable to (..., Hq, Lq, Lk); True means "may attend".

    It is indexed by query and key number, not by position. Three dimensions are (Hq, Lq, Lk);
    a mask for each sample is (B, 1, Lq, Lk).
    """

    keep: Tensor

    def __init__(self, keep: Tensor) -> None:
        self._set(keep=bool_tensor("Dense(keep)", keep, 2))

    @classmethod
    def borrow(cls, keep: Tensor) -> Dense:
        """A Dense that does not own its tensor: for a single call, which does not outlive it."""
        return cls._of(keep)

    def _sizes(self) -> tuple[int, int]:
        Lq, Lk = self.keep.shape[-2:]
        return Lq if Lq > 1 else 0, Lk if Lk > 1 else 0

    def _check(self, sizes: CallSizes) -> None:
        _check_matrix("Dense(keep)", self.keep, sizes, sizes.Lq, sizes.Lk, broadcast=True)

    def _sees(self, at: At) -> Tensor:
        return at.at_block(self.keep, 1)

    def _cut(self, part: Rectangle) -> Mask:
        return self.borrow(cut(self.keep, part.samples, part.heads, part.rows))


@declare(Op.BLOCKS, table=3)
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

    def _check(self, sizes: CallSizes) -> None:
        nq, nk = -(-sizes.Lq // self.block), -(-sizes.Lk // self.block)
        _check_matrix(f"Blocks(table, block={self.block})", self.table, sizes, nq, nk, broadcast=False)

    def _sees(self, at: At) -> Tensor:
        return at.at_block(self.table, self.block)

    def _cut(self, part: Rectangle) -> Mask:
        """Written out, for blocks need not begin where the part does."""
        rows = torch.arange(part.rows.start, part.rows.stop, device=self.device) // self.block
        keys = torch.arange(part.Lk, device=self.device) // self.block
        return Dense.borrow(cut(self.table, part.samples, part.heads)[..., rows[:, None], keys])


def _check_matrix(
    name: str, matrix: Tensor, sizes: CallSizes, rows: int, columns: int, broadcast: bool
) -> None:
    shape = tuple(matrix.shape)
    exact = broadcast or shape[-2:] == (rows, columns)
    heads = (*shape[-3:-2], 1)[0] if sizes.heads is None else sizes.heads
    if not exact or not broadcasts(shape[-3:], (heads, rows, columns)) or not sizes.batch_fits(shape[:-3]):
        wanted = f"(batch {sizes.batch}, Hq = {sizes.heads}, {rows}, {columns})"
        raise ValueError(
            f"{name}: shape {shape} does not broadcast to {wanted} for Lq = {sizes.Lq}, Lk = {sizes.Lk}; "
            "the third dimension from the right is the heads, batch dimensions come before it"
        )
