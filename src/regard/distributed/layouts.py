"""Layouts: which tokens of a sequence each rank holds."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._tools.arguments import count, describe
from ..masks import Mask
from ._pairs import PairCounter

Run = tuple[int, int]  # tokens [begin, end)
BALANCED = 1.03  # visible pairs of the slowest rank, relative to the mean


@dataclass(frozen=True)
class Layout:
    """A division of the tokens [0, L) among ranks.

    A rank holds the runs `runs[rank]` of consecutive tokens, in ascending order. Its shard of a
    tensor is the concatenation of its runs. Layouts are values: they can be compared, hashed and
    pickled. Use `contiguous`, `zigzag`, `striped` or `balanced`, or give the runs.

    Example:
        >>> regard.distributed.Layout((((0, 3), (9, 10)), ((3, 9),))).lengths
        (4, 6)
    """

    runs: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        position = 0
        for begin, end in sorted(run for runs in self.runs for run in runs):
            if begin != position or end <= begin:
                raise ValueError(
                    f"runs: expected runs (begin, end) that cover each token from 0 to L once, got run "
                    f"{(begin, end)} after {position} tokens"
                )
            position = end
        if any(list(runs) != sorted(runs) for runs in self.runs):
            raise ValueError("runs: expected ascending runs on each rank, got others")

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @functools.cached_property
    def L(self) -> int:
        """The number of tokens of the sequence."""
        return sum(self.lengths)

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens on each rank."""
        return tuple(sum(end - begin for begin, end in runs) for runs in self.runs)

    def grouped(self, size: int) -> Layout:
        """Returns the layout of groups of `size` consecutive ranks: each holds its ranks' tokens."""
        groups = (self.runs[i : i + size] for i in range(0, self.ranks, size))
        return Layout(tuple(joined(run for runs in group for run in runs) for group in groups))


def contiguous(L: int, ranks: int) -> Layout:
    """Returns the layout with one run on each rank. Lengths differ by at most one token.

    Causal masks leave the first rank with little work: use `zigzag` or `balanced`.
    """
    return Layout(tuple(joined([run]) for run in even(*_sizes(L, ranks))))


def zigzag(L: int, ranks: int) -> Layout:
    """Returns the layout for causal masks: rank r holds chunks r and 2 * ranks - 1 - r."""
    L, ranks = _sizes(L, ranks)
    chunks = even(L, 2 * ranks)
    return Layout(tuple(joined([chunks[r], chunks[-1 - r]]) for r in range(ranks)))


def striped(L: int, ranks: int, block: int) -> Layout:
    """Returns the layout that deals blocks of `block` tokens to the ranks in turn.

    Each pair of runs is a separate kernel call, so small blocks are slow.
    """
    L, ranks = _sizes(L, ranks)
    block = count("block", block, 1)
    runs = [(begin, min(begin + block, L)) for begin in range(0, L, block)]
    return Layout(tuple(joined(runs[r::ranks]) for r in range(ranks)))


def balanced(mask: Mask | None, L: int, ranks: int) -> Layout:
    """Returns a layout that gives every rank nearly the same number of visible pairs.

    The sequence is divided into blocks, and each block, the largest first, goes to the rank with
    the fewest pairs so far. There are as few blocks as keep the slowest rank within 1.03 times the
    mean, because each run of a rank costs kernel calls. The mask is that of self-attention over L
    tokens.
    """
    L, ranks = _sizes(L, ranks)
    if not (mask is None or isinstance(mask, Mask)):
        raise TypeError(f"mask: expected a Mask or None, got {describe(mask)}")
    counter = PairCounter.of(mask, L)
    best, dealt = float("inf"), []
    for pieces in (2, 4, 8, 16, 32, 64):  # of each rank, at least
        slowest, candidate = _deal(counter, pieces, ranks)
        if slowest < best:
            best, dealt = slowest, candidate
        if best <= BALANCED or ranks == 1:
            break
    return Layout(tuple(joined(runs) for runs in dealt))


def _deal(counter: PairCounter, pieces: int, ranks: int) -> tuple[float, list[list[Run]]]:
    """Deals blocks to ranks. Returns the slowest rank's share of the mean, and the runs."""
    largest = max(2 * counter.total // (pieces * ranks), 1)
    blocks = [piece for run in even(counter.Lq, pieces * ranks) for piece in _split(counter, run, largest)]
    heap = [(0, 0, rank) for rank in range(ranks)]  # pairs, tokens, rank
    dealt: list[list[Run]] = [[] for _ in range(ranks)]
    for pairs, (begin, end) in sorted(blocks, key=lambda block: (-block[0], block[1])):
        load, tokens, rank = heapq.heappop(heap)
        dealt[rank].append((begin, end))
        heapq.heappush(heap, (load + pairs, tokens + end - begin, rank))
    return max(heap)[0] * ranks / max(counter.total, 1), dealt


def _split(counter: PairCounter, run: Run, largest: int) -> list[tuple[int, Run]]:
    """Halves a run until each piece has at most `largest` pairs or one token."""
    begin, end = run
    pairs = counter.pairs(run, (0, counter.Lk))
    if pairs <= largest or end - begin <= 1:
        return [(pairs, run)] if end > begin else []
    middle = (begin + end) // 2
    return _split(counter, (begin, middle), largest) + _split(counter, (middle, end), largest)


def _sizes(L: int, ranks: int) -> tuple[int, int]:
    return count("L", L), count("ranks", ranks, 1)


def even(L: int, pieces: int) -> list[Run]:
    """Divides [0, L) into runs whose lengths differ by at most 1, longer ones first."""
    size, longer = divmod(L, pieces)
    starts = [i * size + min(i, longer) for i in range(pieces + 1)]
    return list(itertools.pairwise(starts))


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Sorts runs, drops empty ones and joins runs that touch."""
    result: list[Run] = []
    for begin, end in sorted(run for run in runs if run[1] > run[0]):
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return tuple(result)


def as_pair(layout: object, ranks: int) -> tuple[Layout, Layout]:
    """Returns the layouts of queries and keys. Checks that they are for `ranks` ranks."""
    pair = (layout, layout) if isinstance(layout, Layout) else layout
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(x, Layout) for x in pair):
        raise TypeError(f"layout: expected a Layout, or a pair for queries and keys, got {describe(layout)}")
    for own in pair:
        if own.ranks != ranks:
            raise ValueError(f"layout: expected {ranks} ranks as in the mesh, got {own.ranks}")
    return pair


# Tensors


def shard(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """Returns a rank's shard of x along `dim`, which has layout.L tokens."""
    check_rank(layout, rank)
    if x.shape[dim] != layout.L:
        raise ValueError(f"x: expected layout.L = {layout.L} tokens in dim {dim}, got shape {tuple(x.shape)}")
    return take(x, layout.runs[rank], dim)


def take(x: Tensor, runs: Iterable[Run], dim: int) -> Tensor:
    """Returns the concatenation of runs of x."""
    pieces = [x.narrow(dim, begin, end - begin) for begin, end in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [x.narrow(dim, 0, 0)], dim)


def in_order(shards: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """Returns the whole tensor from the shards of all ranks."""
    pieces: list[tuple[int, Tensor]] = []
    for x, runs in zip(shards, layout.runs, strict=True):
        sizes = [end - begin for begin, end in runs]
        pieces += zip((begin for begin, _ in runs), x.split(sizes, dim), strict=True)
    ordered = [piece for _, piece in sorted(pieces, key=lambda item: item[0])]
    return torch.cat(ordered, dim) if ordered else shards[0]


def positions(layout: Layout, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Returns the position of each of a rank's tokens, int64 (lengths[rank],), as RoPE needs them."""
    check_rank(layout, rank)
    runs = [torch.arange(begin, end, device=device) for begin, end in layout.runs[rank]]
    return torch.cat(runs) if runs else torch.arange(0, device=device)


def next_tokens(
    tokens: Tensor, layout: Layout, rank: int, *, documents: Tensor | None = None, ignore: int = -100
) -> Tensor:
    """Returns the labels of a rank's tokens for the next-token loss, (..., lengths[rank]).

    The label of a token is the token that follows it in the sequence, on whichever rank that is.

    Args:
        tokens: the whole sequence (..., L).
        documents: document ids (..., L). The last token of a document gets `ignore`.
        ignore: the label of the last token.
    """
    following = torch.nn.functional.pad(tokens[..., 1:], (0, 1), value=ignore)
    if documents is not None:
        ends = documents[..., 1:] != documents[..., :-1]
        following = following.masked_fill(torch.nn.functional.pad(ends, (0, 1)), ignore)
    return shard(following, layout, rank, -1)


def check_rank(layout: Layout, rank: int) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: expected a Layout, as from contiguous(L, ranks), got {describe(layout)}")
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank: expected 0 to {layout.ranks - 1}, the layout's ranks, got {rank}")
