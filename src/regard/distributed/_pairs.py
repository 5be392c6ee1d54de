"""Counts the visible pairs of rectangles of a call, without its data."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._backends.native import attention as native, core
from .._call.make import make
from .._call.spec import Options
from .._tools.arguments import common_shape
from ..masks import Mask, PerHead
from ..masks._cut import cut

Run = tuple[int, int]


class PairCounter(NamedTuple):
    """A mask with the sizes of the call that it is applied to."""

    mask: Mask | None
    B: int
    heads: int
    Lq: int
    Lk: int
    offset: tuple[int, ...]  # one for all samples, or one for each

    @classmethod
    def of(cls, mask: Mask | None, L: int) -> PairCounter:
        """Returns the counter of self-attention over L tokens."""
        batch, heads = mask_sizes(mask)
        return cls(mask, batch, heads, L, L, (0,))

    @property
    def total(self) -> int:
        return self.pairs((0, self.Lq), (0, self.Lk))

    def pairs(self, queries: Run, keys: Run) -> int:
        """Returns the number of visible pairs, over all samples and heads."""
        counts = _counts(self)
        if (queries, keys) not in counts:
            counts[queries, keys] = _count(self, queries, keys)
        return counts[queries, keys]

    def visible(self, queries: Run, keys: Run) -> bool:
        return self.pairs(queries, keys) > 0


@functools.lru_cache(maxsize=32)  # few, because they keep the tensors of masks alive
def _counts(call: PairCounter) -> dict[tuple[Run, Run], int]:
    """Returns the memory of the pairs in rectangles that have been counted."""
    return {}


def _count(call: PairCounter, queries: Run, keys: Run) -> int:
    rows, columns = queries[1] - queries[0], keys[1] - keys[0]
    if call.mask is None or rows * columns == 0:
        return call.B * call.heads * rows * columns
    mask = cut(call.mask, queries, keys, call.Lq, call.Lk)
    shift = queries[0] - keys[0]
    offset = offset_of(tuple(x + shift for x in call.offset))
    if core.reason_unavailable() is not None:
        dense = mask.to_dense(rows, columns, offset, call.heads)
        return int(dense.expand(*common_shape(dense.shape, (call.B, call.heads, rows, columns))).sum())
    q, k = (torch.empty(call.B, call.heads, n, 0) for n in (rows, columns))
    return native.cost(make(q, k, k, Options(mask=mask, offset=offset, scale=1.0))).pairs


def offset_of(offsets: tuple[int, ...]) -> int | Tensor:
    return offsets[0] if len(offsets) == 1 else torch.tensor(offsets)


def mask_sizes(mask: Mask | None) -> tuple[int, int]:
    """Returns the smallest batch size and number of heads that the mask's tensors apply to."""
    if mask is None:
        return 1, 1
    program = mask.lower()
    leads = [x.shape[: x.ndim - core] for x, core in zip(program.tensors, program.cores, strict=True)]
    heads = [x.shape[-3] for x, core in zip(program.tensors, program.cores, strict=True) if core == 3]
    heads += [_per_head(mask)]
    return math.prod(common_shape(*leads)), max(heads)


def _per_head(mask: Mask) -> int:
    own = len(mask.masks) if isinstance(mask, PerHead) else 1
    return max(own, *(_per_head(child) for child in mask._children()), 1)
