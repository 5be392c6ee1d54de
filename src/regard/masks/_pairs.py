"""Pairs of queries and keys: where the formula of a mask is evaluated.

`to_dense` evaluates it on a `Grid`, all pairs of a call at once. FlexAttention evaluates it at a `Pair`. Both
answer the same questions, so that an atom has one formula for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import common_shape

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # FlexAttention's mask_mod(b, h, q_idx, kv_idx)


class Grid(NamedTuple):
    """All pairs of a call. Results broadcast to (*batch, H, Lq, Lk)."""

    query: Tensor  # (Lq,)
    pos: Tensor  # (Lq,), or (*batch, Lq) when the samples differ
    j: Tensor  # (Lk,), the index and position of each key

    @property
    def i(self) -> Tensor:
        """The index of the query."""
        return column(self.query)

    @property
    def p(self) -> Tensor:
        """The position of the query."""
        return column(self.pos)

    def of_sample(self, x: Tensor) -> Tensor:
        """Of one number for each sample, x (*batch,)."""
        return x[..., None, None, None] if x.ndim else x

    def at_query(self, x: Tensor) -> Tensor:
        return column(x)

    def at_key(self, x: Tensor) -> Tensor:
        return row(x)

    def at_position(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x (*batch, L) at the position of the query, and whether that lies inside x."""
        L = x.shape[-1]
        inside = (self.pos >= 0) & (self.pos < L)
        lead = common_shape(x.shape[:-1], self.pos.shape[:-1])
        # One more column for the positions outside, so that there is something to gather.
        padded = torch.nn.functional.pad(x, (0, 1)).expand(*lead, L + 1)
        at = torch.where(inside, self.pos, L).expand(*lead, -1)
        return column(padded.gather(-1, at)), column(inside)

    def at_block(self, x: Tensor, size: int) -> Tensor:
        """Of a table x (*batch, H, nq, nk) over blocks of `size` queries and keys."""
        return x if size == 1 else x[..., self.i // size, self.j // size]

    def by_head(self, seen: Sequence[Tensor]) -> Tensor:
        """Stacks the results for each head, (..., 1 or H, Lq, Lk), of which head h takes its own."""
        heads = [x if x.ndim < 3 else x.select(-3, h if x.shape[-3] > 1 else 0) for h, x in enumerate(seen)]
        shape = common_shape((len(self.query), len(self.j)), *(x.shape for x in heads))
        return torch.stack([x.expand(shape) for x in heads], dim=-3)


class Scene(NamedTuple):
    """The sizes of a call, and where its queries can stand."""

    Lk: int
    offset: int | Tensor
    lowest: int
    highest: int
    device: torch.device


class Pair(NamedTuple):
    """One pair of a scene, by index. Tensors of masks have one batch dim of 1 or B."""

    scene: Scene
    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor

    @property
    def p(self) -> Tensor:
        offset = self.scene.offset
        return self.i + (pick(offset, self.b) if isinstance(offset, Tensor) else offset)

    def of_sample(self, x: Tensor) -> Tensor:
        return pick(x, self.b)

    def at_query(self, x: Tensor) -> Tensor:
        return pick(x, self.b, self.i)

    def at_key(self, x: Tensor) -> Tensor:
        return pick(x, self.b, self.j)

    def at_position(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = (self.p >= 0) & (self.p < x.shape[1])
        return pick(x, self.b, torch.where(inside, self.p, 0)), inside

    def at_block(self, x: Tensor, size: int) -> Tensor:
        return pick(x, self.b, self.h, self.i // size, self.j // size)

    def by_head(self, seen: Sequence[Tensor]) -> Tensor:
        return reduce(torch.logical_or, ((self.h == h) & x for h, x in enumerate(seen)))


At = Grid | Pair


def column(x: Tensor) -> Tensor:
    """(*batch, Lq) -> (*batch, 1, Lq, 1); without batch dims (Lq, 1)."""
    return x[..., None, :, None] if x.ndim > 1 else x[:, None]


def row(x: Tensor) -> Tensor:
    """(*batch, Lk) -> (*batch, 1, 1, Lk); without batch dims (Lk,)."""
    return x[..., None, None, :] if x.ndim > 1 else x


def pick(tensor: Tensor, *index: Tensor) -> Tensor:
    """Indexes with broadcasting: a dimension of size 1 is read at 0."""
    return tensor[tuple(x if n > 1 else x * 0 for x, n in zip(index, tensor.shape, strict=True))]


class Rectangle(NamedTuple):
    """Some samples, query heads and query rows of a call, and all its keys."""

    samples: slice
    heads: slice
    rows: slice
    Lk: int


def cut(x: Tensor, *slices: slice) -> Tensor:
    """A view of x: a slice of each dim from the left, except that a dim of size 1 serves every index."""
    return x[tuple(s if n > 1 else slice(None) for n, s in zip(x.shape, slices, strict=False))]
