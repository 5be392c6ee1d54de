"""Mask atoms: the masks that are no combination of other masks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from .._tools.arguments import (
    bool_tensor,
    broadcasts,
    check_not_3d,
    count,
    describe,
    int_tensor,
    is_integer,
    readable,
)
from .._tools.values import value
from ._mask import CallSizes, Mask, MaskKind, declare
from ._pairs import FlexCall, Grid, Mod, Pair, Pairs, Rectangle, column, cut, pick, row
from ._program import UNLIMITED, Op, Pool, node
from ._random import chosen_blocks, signed

# `inspect.signature` shows a parameter with this default as one without a default.
REQUIRED: Any = inspect.Parameter.empty


@declare(Op.WINDOW, kind=MaskKind.DISTANCE, cost=0)
class Window(Mask):
    """A mask that allows keys from `left` positions before to `right` positions after the query.

    `left` and `right` are distances, as in flash-attn. A query attends to left + 1 + right keys,
    to fewer near the ends of the sequence. `masks.sliding(n)` counts keys instead.

    Args:
        left: largest distance to an earlier key. None: no limit.
        right: largest distance to a later key, 0: no later key. None: no limit.

    Example:
        >>> masks.Window(left=2, right=0).to_dense(4, 4).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [0, 1, 1, 1]], dtype=torch.int32)
    """

    left: int | None
    right: int | None

    def __init__(self, left: int | None, right: int | None = REQUIRED) -> None:
        if right is REQUIRED:
            raise TypeError(_one_number(left))
        self._set(left=_reach("left", left), right=_reach("right", right))

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right})"

    def _allows(self, pairs: Pairs) -> Tensor:
        if self.left is None:
            return pairs.j == pairs.j if self.right is None else pairs.j <= pairs.p + self.right
        allowed = pairs.p - self.left <= pairs.j
        return allowed if self.right is None else allowed & (pairs.j <= pairs.p + self.right)

    def _intersection(self, other: Mask) -> Mask | None:
        if not isinstance(other, Window):
            return None
        reaches = _smaller(self.left, other.left), _smaller(self.right, other.right)
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
    """A mask that allows keys at or before the query's position: `Window(left=None, right=0)`."""

    left, right = None, 0

    def __init__(self) -> None: ...

    def __repr__(self) -> str:
        return "Causal()"


def _one_number(n: object) -> str:
    """Returns the message for `Window(n)`, which could count keys or give a distance."""
    if not is_integer(n):
        return f"Window: expected two distances, as in Window(left=3, right=0), got only {describe(n)}"
    return (
        f"Window: expected two distances, got only {n}; write sliding({n}) for {n} keys, the query's own "
        f"included, or Window(left={n}, right=0) for keys up to {n} positions before the query"
    )


def _reach(name: str, reach: int | None) -> int | None:
    if reach is None:
        return None
    if is_integer(reach) and reach < 0:
        raise ValueError(f"Window({name}): expected a distance >= 0, or None for no limit, got {reach}")
    return count(f"Window({name})", reach)


def _smaller(a: int | None, b: int | None) -> int | None:
    """Returns the smaller of two limits of a Window (`left` or `right`). None means no limit."""
    return b if a is None else a if b is None else min(a, b)


@declare(Op.LENGTHS, cost=0, n=0)
class Lengths(Mask):
    """A mask that allows the first n[b] keys of sample b, for padded batches.

    Args:
        n: an int for all samples, or integers of the batch shape (*batch,).
    """

    n: Tensor

    def __init__(self, n: int | Sequence[int] | Tensor) -> None:
        n = int_tensor("Lengths(n)", n, 0)
        if readable(n) and n.numel() and int(n.min()) < 0:
            raise ValueError(f"Lengths(n): expected lengths >= 0, got {int(n.min())}")
        self._set(n=n)

    @functools.cached_property
    def _max_length(self) -> int:
        return int(self.n.max()) if readable(self.n) and self.n.numel() else 0

    def _check(self, sizes: CallSizes) -> None:
        if not sizes.batch_fits(tuple(self.n.shape)):
            shape = tuple(self.n.shape)
            raise ValueError(f"Lengths(n): expected shape broadcastable to batch {sizes.batch}, got {shape}")

    def _allows(self, pairs: Pairs) -> Tensor:
        return pairs.j < pairs.of_sample(self.n)


@declare(Op.DOCUMENTS, Op.TOKENS, q_ids=1, k_ids=1)
class Documents(Mask):
    """A mask that allows keys whose document id equals the query's.

    Args:
        q_ids: ids of the queries (..., Lq). If `k_ids` is None, these are the ids (..., Lk) of all
            positions, for queries and keys alike. A query whose position is outside [0, Lk) then
            may attend to no key.
        k_ids: ids of the keys (..., Lk). If given, ids are looked up by index, not by position.
    """

    q_ids: Tensor
    k_ids: Tensor | None

    def __init__(self, q_ids: Tensor | Sequence[int], k_ids: Tensor | Sequence[int] | None = None) -> None:
        keys = None if k_ids is None else int_tensor("Documents(k_ids)", k_ids, 1)
        self._set(q_ids=int_tensor("Documents(q_ids)", q_ids, 1), k_ids=keys)

    def _sizes(self) -> tuple[int, int]:
        L = self.q_ids.shape[-1]
        return (0, L) if self.k_ids is None else (L, self.k_ids.shape[-1])

    def _check(self, sizes: CallSizes) -> None:
        if self.k_ids is None:
            _check_ids("q_ids", self.q_ids, "Lk", sizes.Lk, sizes)
        else:
            _check_ids("q_ids", self.q_ids, "Lq", sizes.Lq, sizes)
            _check_ids("k_ids", self.k_ids, "Lk", sizes.Lk, sizes)

    def _allows(self, pairs: Pairs) -> Tensor:
        if self.k_ids is not None:
            return pairs.at_query(self.q_ids) == pairs.at_key(self.k_ids)
        query_ids, inside = pairs.at_position(self.q_ids)
        return inside & (query_ids == pairs.at_key(self.q_ids))

    def _encode(self, pool: Pool) -> list[int]:
        if self.k_ids is None:
            return node(Op.TOKENS, pool.add(self.q_ids, self._dims["q_ids"]))
        return super()._encode(pool)

    def _cut(self, tile: Rectangle) -> Mask:
        if self.k_ids is None:
            return super()._cut(tile)
        return self._of(cut(self.q_ids, tile.samples, tile.rows), cut(self.k_ids, tile.samples))


def _check_ids(name: str, ids: Tensor, letter: str, length: int, sizes: CallSizes) -> None:
    if ids.shape[-1] != length or not sizes.batch_fits(tuple(ids.shape[:-1])):
        raise ValueError(
            f"Documents({name}): expected shape (..., {letter} = {length}) broadcastable to batch "
            f"{sizes.batch}, got {tuple(ids.shape)}"
        )


@declare(Op.PREFIX, kind=MaskKind.POSITION, cost=0)
class Prefix(Mask):
    """A mask that allows the first n keys. For a different n per sample use `Lengths`."""

    n: int

    def __init__(self, n: int) -> None:
        self._set(n=count("Prefix(n)", n))

    def _allows(self, pairs: Pairs) -> Tensor:
        return pairs.j < self.n


@declare(Op.GLOBAL, kind=MaskKind.POSITION, tokens=1)
class Global(Mask):
    """A mask of global tokens. Global tokens attend to all keys, and all queries attend to them.

    Args:
        tokens: positions (n,), or (..., n) per sample, padded with -1; or a bool tensor (..., L)
            that is True at global tokens. The attribute `tokens` holds positions in ascending
            order without duplicates, padding first.
    """

    tokens: Tensor

    def __init__(self, tokens: Sequence[int] | Tensor) -> None:
        self._set(tokens=_ascending(_positions(tokens)))

    def _check(self, sizes: CallSizes) -> None:
        if not sizes.batch_fits(tuple(self.tokens.shape[:-1])):
            raise ValueError(
                f"Global(tokens): expected shape (..., n) broadcastable to batch {sizes.batch}, "
                f"got {tuple(self.tokens.shape)}"
            )

    def _dense(self, grid: Grid) -> Tensor:
        queries = _among(grid.pos, self.tokens)
        return column(queries) | row(_among(grid.j, self.tokens))

    def _mod(self, call: FlexCall) -> Mod:
        tokens, size = self.tokens, max(call.Lk, call.highest + 1, 1)
        # Padding and tokens beyond all positions are written to an extra column, which is removed.
        columns = torch.where((tokens >= 0) & (tokens < size), tokens, size)
        marks = torch.zeros(len(tokens), size + 1, dtype=torch.bool, device=call.device)
        marks = marks.scatter(1, columns, True)[:, :size].contiguous()

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            pair = Pair(call, b, h, q, k)
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
            f"Global(tokens): expected positions >= 0, or -1 for padding, got {int(positions.min())}"
        )
    return positions


def _ascending(tokens: Tensor) -> Tensor:
    """Sorts positions (..., n), replaces duplicates by padding, and drops columns of padding."""
    tokens = tokens.sort(-1).values
    repeats = torch.nn.functional.pad(tokens[..., 1:] == tokens[..., :-1], (1, 0))[..., : tokens.shape[-1]]
    tokens = tokens.masked_fill(repeats, -1).sort(-1).values
    if not readable(tokens):
        return tokens.contiguous()
    padding = int((tokens < 0).sum(-1).min()) if tokens.numel() else 0
    return tokens[..., padding:].contiguous()


def _among(positions: Tensor, tokens: Tensor) -> Tensor:
    """Returns whether each position (..., L) occurs in tokens (..., n), ignoring padding."""
    return ((positions[..., :, None] == tokens[..., None, :]) & (tokens >= 0)[..., None, :]).any(-1)


@declare(Op.RANDOM, kind=MaskKind.POSITION, cost=2)
class RandomBlocks(Mask):
    """A mask that allows `per_row` random key blocks for each block of query positions.

    The choice depends only on the seed, the query block and the number of key blocks. It is the
    same on every machine.

    Args:
        per_row: number of key blocks for each query block.
        block: tokens per block.
        seed: a 64-bit integer.
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
        rows, inverse = torch.unique(grid.pos.div(self.block, rounding_mode="floor"), return_inverse=True)
        allowed = self._table(rows, grid.Lk)[inverse][..., grid.j // self.block]
        return allowed.unsqueeze(-3) if allowed.ndim > 2 else allowed

    def _mod(self, call: FlexCall) -> Mod:
        first, last = call.lowest // self.block, call.highest // self.block
        table = self._table(torch.arange(first, last + 1, device=call.device), call.Lk)

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return pick(table, Pair(call, b, h, q, k).p // self.block - first, k // self.block)

        return mod

    def _table(self, rows: Tensor, Lk: int) -> Tensor:
        """Returns the key blocks chosen for query blocks `rows` (R,), as bool (R, key blocks)."""
        return chosen_blocks(rows, -(-Lk // self.block), self.per_row, self.seed)

    def _arguments(self, pool: Pool) -> list[int]:
        return [self.per_row, self.block, signed(self.seed)]


def _seed(seed: int) -> int:
    if not is_integer(seed):
        raise TypeError(f"RandomBlocks(seed): expected an int, got {describe(seed)}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"RandomBlocks(seed): expected an int of 64 bits, got {seed}")
    return int(seed)


@declare(Op.DILATED, kind=MaskKind.DISTANCE, cost=2)
class Dilated(Mask):
    """A mask that allows keys whose distance from the query's position is a multiple of `step`."""

    step: int

    def __init__(self, step: int) -> None:
        self._set(step=count("Dilated(step)", step, 1))

    def _allows(self, pairs: Pairs) -> Tensor:
        return (pairs.p - pairs.j) % self.step == 0


@declare(Op.DENSE, cost=2, keep=3)
class Dense(Mask):
    """A mask given as a bool tensor; True = may attend.

    Rows and columns are query and key indices, not positions, so `offset` has no effect.

    Args:
        keep: bool, broadcastable to (*batch, Hq, Lq, Lk). Three dims are (Hq, Lq, Lk) and apply
            only to calls without batch dims. With batch dims, a mask per sample is (B, 1, Lq, Lk),
            a mask per head (1, Hq, Lq, Lk).
    """

    keep: Tensor

    def __init__(self, keep: Tensor) -> None:
        self._set(keep=torch.atleast_2d(bool_tensor("Dense(keep)", keep, 1)))

    @classmethod
    def borrow(cls, keep: Tensor) -> Dense:
        """Returns a Dense that refers to `keep` without copying it. For use within one call."""
        return cls._of(keep)

    def _sizes(self) -> tuple[int, int]:
        Lq, Lk = self.keep.shape[-2:]
        return Lq if Lq > 1 else 0, Lk if Lk > 1 else 0

    def _check(self, sizes: CallSizes) -> None:
        if sizes.batch:
            check_not_3d("mask", self.keep.shape)
        _check_matrix("mask", self.keep, sizes, sizes.Lq, sizes.Lk, broadcast=True)

    def _allows(self, pairs: Pairs) -> Tensor:
        return pairs.at_block(self.keep, 1, 1)

    def _cut(self, tile: Rectangle) -> Mask:
        return self.borrow(cut(self.keep, tile.samples, tile.heads, tile.rows))


@declare(Op.BLOCKS, table=3)
class Blocks(Mask):
    """A block-sparse mask: a bool table with an entry for each block of `block` x `block` pairs.

    Rows and columns are query and key indices, not positions, so `offset` has no effect.

    Args:
        table: bool (*batch, Hq, ceil(Lq / block), ceil(Lk / block)), True = may attend. Batch and
            head dims broadcast.
        block: tokens per block.
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

    def _allows(self, pairs: Pairs) -> Tensor:
        return pairs.at_block(self.table, self.block, self.block)

    def _cut(self, tile: Rectangle) -> Mask:
        """Returns a Dense mask of the tile, because a tile may begin in the middle of a block."""
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=self.device) // self.block
        keys = torch.arange(tile.Lk, device=self.device) // self.block
        return Dense.borrow(cut(self.table, tile.samples, tile.heads)[..., rows[:, None], keys])


@declare(Op.PATTERNS, table=3, patterns=3)
class BlockPatterns(Mask):
    """A block-sparse mask whose blocks have patterns, for blocks that are allowed in part.

    Query i may attend to key j if
    `patterns[table[i // rows, j // columns], i % rows, j % columns]`. Equal blocks share a pattern,
    so memory grows with the number of different blocks. Rows and columns are query and key indices,
    not positions, so `offset` has no effect.

    Args:
        table: integers (*batch, Hq, ceil(Lq / rows), ceil(Lk / columns)), the pattern of each
            block. Batch and head dims broadcast.
        patterns: bool (n, rows, columns), True = may attend. Pattern 0 allows no pair of a block,
            pattern 1 all pairs.
    """

    table: Tensor
    patterns: Tensor

    def __init__(self, table: Tensor, patterns: Tensor) -> None:
        table = int_tensor("BlockPatterns(table)", table, 2)
        patterns = bool_tensor("BlockPatterns(patterns)", patterns, 3)
        if patterns.ndim != 3 or len(patterns) < 2 or 0 in patterns.shape:
            shape = tuple(patterns.shape)
            raise ValueError(f"BlockPatterns(patterns): expected (n >= 2, rows, columns), got {shape}")
        if readable(patterns) and (patterns[0].any() or not patterns[1].all()):
            raise ValueError("BlockPatterns(patterns): expected all False, all True, ..., got others first")
        if readable(table) and ((table < 0) | (table >= len(patterns))).any():
            raise ValueError(f"BlockPatterns(table): expected patterns 0 to {len(patterns) - 1}, got others")
        self._set(table=table, patterns=patterns)

    @property
    def block(self) -> tuple[int, int]:
        """The numbers of queries and of keys of a block."""
        rows, columns = self.patterns.shape[-2:]
        return rows, columns

    def _sizes(self) -> tuple[int, int]:
        nq, nk = self.table.shape[-2:]
        return nq * self.block[0], nk * self.block[1]

    def _check(self, sizes: CallSizes) -> None:
        nq, nk = -(-sizes.Lq // self.block[0]), -(-sizes.Lk // self.block[1])
        _check_matrix(f"BlockPatterns(table), block={self.block}", self.table, sizes, nq, nk, broadcast=False)

    def _allows(self, pairs: Pairs) -> Tensor:
        return self._at(pairs.at_block(self.table, *self.block), pairs.i, pairs.j)

    def _at(self, pattern: Tensor, i: Tensor, j: Tensor) -> Tensor:
        rows, columns = self.block
        # A bound mask has patterns (1, n, rows, columns).
        return self.patterns.flatten(0, -3)[pattern, i % rows, j % columns]

    def _cut(self, tile: Rectangle) -> Mask:
        """Returns a Dense mask of the tile, because a tile may begin in the middle of a block."""
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=self.device)[:, None]
        keys = torch.arange(tile.Lk, device=self.device)
        table = cut(self.table, tile.samples, tile.heads)
        return Dense.borrow(self._at(table[..., rows // self.block[0], keys // self.block[1]], rows, keys))


def _check_matrix(
    name: str, matrix: Tensor, sizes: CallSizes, rows: int, columns: int, broadcast: bool
) -> None:
    shape = tuple(matrix.shape)
    exact = broadcast or shape[-2:] == (rows, columns)
    heads = (*shape[-3:-2], 1)[0] if sizes.heads is None else sizes.heads
    if not exact or not broadcasts(shape[-3:], (heads, rows, columns)) or not sizes.batch_fits(shape[:-3]):
        target = f"(batch {sizes.batch}, Hq = {sizes.heads}, {rows}, {columns})"
        hint = "the third dim from the right is the heads, batch dims come before it"
        if sizes.batch is not None and shape == (*sizes.batch, sizes.Lk):
            hint = f"write masks.padding({name}) if a row says which keys of a sample are real"
        raise ValueError(
            f"{name}: expected a shape broadcastable to {target} for Lq = {sizes.Lq}, Lk = {sizes.Lk}, got "
            f"{shape}; {hint}"
        )
