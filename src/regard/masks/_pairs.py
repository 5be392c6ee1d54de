"""Pairs of a query and a key, on which masks are evaluated.

`to_dense` evaluates a mask on a `Grid`, all pairs of a call at once. FlexAttention evaluates it on
one `Pair`. Both classes have the same methods, so that an atom needs only one formula.
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
    """Query-key pairs of a call. Methods return tensors broadcastable to (*batch, H, Lq, Lk)."""

    query: Tensor  # (Lq,), query indices
    pos: Tensor  # (Lq,), or (*batch, Lq) if samples differ: query positions
    j: Tensor  # (n,), key indices, which are also the key positions
    Lk: int  # number of keys of the call
    is_part: bool = False  # the grid has a part of the call's queries and keys

    @property
    def i(self) -> Tensor:
        """The query index of each pair."""
        return column(self.query)

    @property
    def p(self) -> Tensor:
        """The query position of each pair."""
        return column(self.pos)

    def of_sample(self, x: Tensor) -> Tensor:
        """Returns the entry of x (*batch,) for each pair's sample."""
        return x[..., None, None, None] if x.ndim else x

    def at_query(self, x: Tensor) -> Tensor:
        """Returns the entry of x (*batch, Lq) for each pair's query index."""
        return column(x[..., self.query] if self.is_part else x)

    def at_key(self, x: Tensor) -> Tensor:
        """Returns the entry of x (*batch, Lk) for each pair's key index."""
        return row(x[..., self.j] if self.is_part else x)

    def at_position(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the entry of x (*batch, L) for each pair's query position.

        The second result says whether the position is in [0, L).
        """
        L = x.shape[-1]
        inside = (self.pos >= 0) & (self.pos < L)
        lead = common_shape(x.shape[:-1], self.pos.shape[:-1])
        # Positions outside [0, L) read an extra column of zeros.
        padded = torch.nn.functional.pad(x, (0, 1)).expand(*lead, L + 1)
        index = torch.where(inside, self.pos, L).expand(*lead, -1)
        return column(padded.gather(-1, index)), column(inside)

    def at_block(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the entry of x (*batch, H, query blocks, key blocks) for each pair's block.

        A block is `rows` queries x `columns` keys. With 1 x 1, both dims of x broadcast.
        """
        if rows == columns == 1:
            return x if not self.is_part else select(select(x, -2, self.query), -1, self.j)
        return x[..., self.i // rows, self.j // columns]

    def by_head(self, masks: Sequence[Tensor]) -> Tensor:
        """Returns one tensor (..., H, Lq, Lk). Its head h is taken from masks[h]."""
        heads = [x if x.ndim < 3 else x.select(-3, h if x.shape[-3] > 1 else 0) for h, x in enumerate(masks)]
        shape = common_shape((len(self.query), len(self.j)), *(x.shape for x in heads))
        return torch.stack([x.expand(shape) for x in heads], dim=-3)


class FlexCall(NamedTuple):
    """The sizes and query positions of a FlexAttention call."""

    Lk: int
    offset: int | Tensor  # an int, or (B,)
    lowest: int  # the smallest query position of all samples
    highest: int  # the largest query position of all samples
    device: torch.device


class Pair(NamedTuple):
    """One pair (query i, key j) of sample b and head h in a FlexAttention call.

    The tensors x that the methods take have one batch dim, of size 1 or B.
    """

    call: FlexCall
    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor

    @property
    def p(self) -> Tensor:
        offset = self.call.offset
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

    def at_block(self, x: Tensor, rows: int, columns: int) -> Tensor:
        return pick(x, self.b, self.h, self.i // rows, self.j // columns)

    def by_head(self, masks: Sequence[Tensor]) -> Tensor:
        return reduce(torch.logical_or, ((self.h == h) & x for h, x in enumerate(masks)))


Pairs = Grid | Pair


def select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Returns the entries of x at `index` along a dim. A dim of size 1 broadcasts."""
    return x if x.shape[dim] == 1 else x.index_select(dim, index)


def column(x: Tensor) -> Tensor:
    """Reshapes (*batch, Lq) to (*batch, 1, Lq, 1), and (Lq,) to (Lq, 1)."""
    return x[..., None, :, None] if x.ndim > 1 else x[:, None]


def row(x: Tensor) -> Tensor:
    """Reshapes (*batch, Lk) to (*batch, 1, 1, Lk). (Lk,) stays as it is."""
    return x[..., None, None, :] if x.ndim > 1 else x


def pick(tensor: Tensor, *index: Tensor) -> Tensor:
    """Indexes every dim of `tensor`. Dims of size 1 broadcast: they are read at index 0."""
    return tensor[tuple(x if n > 1 else x * 0 for x, n in zip(index, tensor.shape, strict=True))]


class Rectangle(NamedTuple):
    """A tile of a call: a range of samples, query heads and query rows, and all Lk keys."""

    samples: slice
    heads: slice
    rows: slice
    Lk: int


def cut(x: Tensor, *slices: slice) -> Tensor:
    """Returns the view x[slices]. Dims of size 1 broadcast: they are not sliced."""
    return x[tuple(s if n > 1 else slice(None) for n, s in zip(x.shape, slices, strict=False))]
