"""Hypothesis strategies for random masks with matching sizes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from regard import masks as M

SIZES = (1, 2, 3, 5, 7, 17)
BATCHES = ((), (1,), (2,), (3,), (2, 2))


class Case(NamedTuple):
    mask: M.Mask
    batch: tuple[int, ...]
    heads: int
    Lq: int
    Lk: int
    offset: int | Tensor | None  # tensor: shape (B,)

    @property
    def B(self) -> int:
        return math.prod(self.batch)

    @property
    def offsets(self) -> list[int]:
        """Returns the position of query 0 in each of the B samples."""
        if isinstance(self.offset, Tensor):
            return self.offset.flatten().tolist()
        return [self.Lk - self.Lq if self.offset is None else self.offset] * self.B

    def dense(self) -> Tensor:
        """Returns the mask as a bool tensor (B, heads, Lq, Lk)."""
        shape = (self.heads, self.Lq, self.Lk)
        dense = self.mask.to_dense(self.Lq, self.Lk, self.offset, self.heads)
        return dense.expand(*self.batch, *shape).reshape(self.B, *shape)


@st.composite
def mask_strategy(
    draw: st.DrawFn,
    sizes: tuple[int, ...] = SIZES,
    batches: tuple[tuple[int, ...], ...] = BATCHES,
    most_heads: int = 3,
    depth: int = 3,
) -> Case:
    batch, heads = draw(st.sampled_from(batches)), draw(st.integers(1, most_heads))
    Lq, Lk = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    offset = draw(_offsets(batch, Lk))
    return Case(draw(expressions(batch, heads, Lq, Lk, depth)), batch, heads, Lq, Lk, offset)


def _offsets(batch: tuple[int, ...], Lk: int) -> st.SearchStrategy[int | Tensor | None]:
    number = st.integers(-4, Lk + 3)
    shared = st.none() | number
    return shared | _tensors(batch, number) if len(batch) == 1 else shared


def expressions(
    batch: tuple[int, ...], heads: int, Lq: int, Lk: int, depth: int
) -> st.SearchStrategy[M.Mask]:
    leaves = atoms(batch, heads, Lq, Lk)
    if depth == 0:
        return leaves
    inner = st.deferred(lambda: expressions(batch, heads, Lq, Lk, depth - 1))
    several = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        leaves,
        several.map(lambda masks: M.And(*masks)),
        several.map(lambda masks: M.Or(*masks)),
        inner.map(lambda mask: ~mask),
        st.lists(inner, min_size=heads, max_size=heads).map(M.PerHead),
    )


def atoms(batch: tuple[int, ...], heads: int, Lq: int, Lk: int) -> st.SearchStrategy[M.Mask]:
    reach = st.none() | st.integers(0, Lk + 1)
    lead = _broadcastable(batch)
    seed = st.integers(-(2**63), 2**64 - 1)
    return st.one_of(
        st.just(M.Causal()),
        st.builds(M.Window, reach, reach),
        lead.flatmap(lambda b: _tensors(b, st.integers(0, Lk))).map(M.Lengths),
        lead.flatmap(lambda b: _tensors((*b, Lk), st.integers(0, 2))).map(M.Documents),
        st.builds(
            M.Documents,
            lead.flatmap(lambda b: _tensors((*b, Lq), st.integers(-1, 1))),
            lead.flatmap(lambda b: _tensors((*b, Lk), st.integers(-1, 1))),
        ),
        st.integers(0, Lk + 2).map(M.Prefix),
        lead.flatmap(lambda b: _tensors((*b, 3), st.integers(-1, Lk + 2))).map(M.Global),
        st.builds(M.RandomBlocks, st.integers(1, 3), st.integers(1, 4), seed),
        st.integers(1, 4).map(M.Dilated),
        _matrices(batch, heads, Lq, Lk).map(lambda keep: M.Dense(_unambiguous(keep, batch))),
        st.integers(1, 5).flatmap(lambda block: _blocks(batch, heads, Lq, Lk, block)),
        st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(
            lambda block: _block_patterns(batch, heads, Lq, Lk, *block)
        ),
    )


def _unambiguous(keep: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Returns `keep` with a batch dim if it would have three dims in a call with batch dims."""
    return keep[None] if batch and keep.ndim == 3 else keep


def _blocks(batch: tuple[int, ...], heads: int, Lq: int, Lk: int, block: int) -> st.SearchStrategy[M.Mask]:
    rows, columns = -(-Lq // block), -(-Lk // block)
    exact = _matrices(batch, heads, rows, columns).map(
        lambda table: table.expand(*table.shape[:-2], rows, columns)
    )
    return exact.map(lambda table: M.Blocks(table, block))


def _block_patterns(
    batch: tuple[int, ...], heads: int, Lq: int, Lk: int, rows: int, columns: int
) -> st.SearchStrategy[M.Mask]:
    nq, nk = -(-Lq // rows), -(-Lk // columns)
    lead = st.tuples(_broadcastable(batch), st.sampled_from((1, heads))).map(lambda both: (*both[0], both[1]))
    tables = lead.flatmap(lambda lead: _tensors((*lead, nq, nk), st.integers(0, 3)))
    some = _tensors((2, rows, columns), st.integers(0, 1)).map(lambda x: x != 0)
    none = torch.zeros(1, rows, columns, dtype=torch.bool)
    return st.builds(M.BlockPatterns, tables, some.map(lambda some: torch.cat([none, ~none, some])))


def _matrices(batch: tuple[int, ...], heads: int, rows: int, columns: int) -> st.SearchStrategy[Tensor]:
    core = st.tuples(*(st.sampled_from((1, n)) for n in (heads, rows, columns)))
    leading = st.tuples(_broadcastable(batch), core).map(lambda both: (*both[0], *both[1]))
    flat = st.tuples(*(st.sampled_from((1, n)) for n in (rows, columns)))
    return (
        st.one_of(leading, flat)
        .flatmap(lambda shape: _tensors(shape, st.integers(0, 1)))
        .map(lambda t: t != 0)
    )


def _broadcastable(batch: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """Draws shapes that broadcast to the batch: leading dims may be missing, others may be 1."""
    trailing_dims = st.integers(0, len(batch)).map(lambda n: batch[n:])
    return trailing_dims.flatmap(lambda dims: st.tuples(*(st.sampled_from((1, n)) for n in dims)))


def _tensors(shape: tuple[int, ...], elements: st.SearchStrategy[int]) -> st.SearchStrategy[Tensor]:
    n = math.prod(shape)
    lists = st.lists(elements, min_size=n, max_size=n)
    return lists.map(lambda values: torch.tensor(values, dtype=torch.int64).reshape(shape))
