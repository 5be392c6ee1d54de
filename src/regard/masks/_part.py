"""A mask from its program, for some samples, query heads and query rows of a call only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._atoms import Dense, Dilated, Documents, Global, Lengths, Prefix, RandomBlocks, Window
from ._mask import And, Mask, Not, Or, PerHead
from ._program import UNLIMITED, Op

ATOMS: dict[int, Callable[..., Mask]] = {
    Op.LENGTHS: Lengths, Op.TOKENS: Documents, Op.GLOBAL: Global, Op.PREFIX: Prefix, Op.RANDOM: RandomBlocks,
    Op.DILATED: Dilated, Op.AND: And, Op.OR: Or, Op.NOT: Not,
}  # fmt: skip


class Rectangle(NamedTuple):
    samples: slice
    heads: slice
    rows: slice
    Lk: int


def part_of(code: tuple[int, ...], tensors: tuple[Tensor, ...], part: Rectangle) -> Mask:
    """The mask over a part of the call; `tensors` have their batch dims flattened to 1 or B.

    Row 0 of the part stands `part.rows.start` further than row 0 of the call. Dense tensors are borrowed.
    """
    op, arguments = code[0], code[2:]
    if op >= Op.PERHEAD:
        nodes = list(_nodes(arguments))
        if op == Op.PERHEAD:
            return PerHead([part_of(node, tensors, part) for node in nodes[part.heads]])
        return ATOMS[op](*(part_of(node, tensors, part) for node in nodes))
    if op in (Op.DENSE, Op.BLOCKS):
        return Dense.borrow(_dense(tensors[arguments[0]], arguments[1:], part))
    if op == Op.DOCUMENTS:
        queries, keys = (tensors[t] for t in arguments)
        return Documents(cut(queries, part.samples, part.rows), cut(keys, part.samples))
    if op == Op.WINDOW:
        return Window(*(None if reach == UNLIMITED else reach for reach in arguments))
    if op in (Op.LENGTHS, Op.TOKENS, Op.GLOBAL):
        return ATOMS[op](cut(tensors[arguments[0]], part.samples))
    return ATOMS[op](*arguments)


def cut(x: Tensor, *slices: slice) -> Tensor:
    """A view of x: a slice of each dim from the left, except that a dim of size 1 serves every index."""
    return x[tuple(s if n > 1 else slice(None) for n, s in zip(x.shape, slices, strict=False))]


def _dense(keep: Tensor, block: tuple[int, ...], part: Rectangle) -> Tensor:
    """The part of a Dense tensor, or of a table of blocks written out."""
    if not block:
        return cut(keep, part.samples, part.heads, part.rows)
    rows = torch.arange(part.rows.start, part.rows.stop, device=keep.device) // block[0]
    keys = torch.arange(part.Lk, device=keep.device) // block[0]
    return cut(keep, part.samples, part.heads)[..., rows[:, None], keys]


def _nodes(code: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    while code:
        yield code[: code[1]]
        code = code[code[1] :]
