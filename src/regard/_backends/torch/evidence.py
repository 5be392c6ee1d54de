"""PyTorch implementation of evidence, box by box, so that the whole matrix of weights never exists.

Takes a canonical problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import facts as F
from ..._call.spec import Problem
from ...masks._pairs import cut
from .boxes import INF, Box, BoxData, parts
from .higher import softmax, stained, times


class Weights(NamedTuple):
    """The weights in a box. Keys outside `box.keys` have none."""

    problem: Problem
    box: Box
    p: Tensor  # (b, h, R, K)
    p_sink: Tensor  # (b, h, R)
    visible: Tensor  # (b, h, R, K)


def evidence(problem: Problem, want: Sequence[F.Fact]) -> list[F.Parts]:
    """The parts of each fact."""
    made = [fact.empty(problem) for fact in want]
    with torch.autocast(problem.spec.device.type, enabled=False):
        for part in parts(problem, (None,) * 6, None, None):
            weights = _weights(problem, part)
            for fact, own in zip(want, made, strict=True):
                COLLECTORS[type(fact)](fact, own, weights)
    return list(made)


def _weights(problem: Problem, part: BoxData) -> Weights:
    x, cap = part.x, part.spec.softcap
    s = times(x.q, x.k.mT)
    if cap is not None:
        s = torch.tanh(s / cap) * cap
    for more in (x.bias, part.taint):
        s = s if more is None else s + more
    visible = torch.ones_like(s, dtype=torch.bool) if part.visible is None else part.visible.expand_as(s)
    p, p_sink, bad = softmax(torch.where(visible, s, -INF), x.sink)
    return Weights(problem, part.box, stained(p, bad, visible), stained(p_sink, bad, None)[..., 0], visible)


# Collectors: each adds the weights of one box to the parts of a fact


def _rows(fact: F.Rows, made: F.Parts, w: Weights) -> None:
    samples, heads, rows = w.box.queries
    for n, i in enumerate(fact.places(w.problem.spec.Lq)):
        if rows.start <= i < rows.stop:
            made[0][samples, heads, n, w.box.keys] = w.p[:, :, i - rows.start]


def _largest(fact: F.TopK | F.RowMax, made: F.Parts, w: Weights) -> None:
    weights, keys = F.largest(w.p, w.visible, fact.k)
    made[0][w.box.queries] = weights
    made[1][w.box.queries] = torch.where(keys < 0, keys, keys + w.box.keys.start)


def _column_mass(fact: F.ColumnMass, made: F.Parts, w: Weights) -> None:
    p, by_row = w.p, fact.by_sample(w.problem.spec)
    if by_row is not None:
        by_row = cut(by_row, w.box.samples, w.box.rows)[:, None, :, None]
        p = torch.where(by_row == 0, 0.0, p * by_row)
    made[0][w.box.samples, w.box.heads, w.box.keys] += p.sum(2, dtype=torch.float64)


def _entropy(fact: F.Entropy, made: F.Parts, w: Weights) -> None:
    made[0][w.box.queries] = torch.special.entr(w.p).sum(-1) + torch.special.entr(w.p_sink)
    made[1][w.box.queries] = w.visible.sum(-1) + int(w.problem.spec.sink)


def _distances(fact: F.DistanceHistogram, made: F.Parts, w: Weights) -> None:
    (mass, distances), spec, offset = made, w.problem.spec, w.problem.offset
    _, _, rows, keys = w.box.numbers(spec.device)
    first = torch.tensor([spec.offset]) if offset is None else offset
    first = cut(first.to(spec.device), w.box.samples)[:, None, None, None]
    at = (first + rows[:, None] - keys - distances[:1]).expand_as(w.p).flatten(2)
    mass[w.box.samples, w.box.heads].scatter_add_(2, at, w.p.flatten(2).double())


def _mass_on(fact: F.MassOn, made: F.Parts, w: Weights) -> None:
    chosen = cut(fact.by_sample(w.problem.spec), w.box.samples)[:, None, None, w.box.keys]
    made[0][w.box.queries] = torch.where(chosen, w.p, 0.0).sum(-1)


def _blocks(fact: F.BlockMass, made: F.Parts, w: Weights) -> None:
    """Rows and keys of the box are filled up with zeros, so that blocks begin at multiples of their size."""
    (whole,), block, (rows, keys) = made, fact.block, (w.box.rows, w.box.keys)
    p = torch.nn.functional.pad(w.p.double(), (keys.start % block, 0, rows.start % block, 0))
    found = fact.coarser(p, block)
    first_row, first_key = rows.start // block, keys.start // block
    at = whole[w.box.samples, w.box.heads, first_row:, first_key:][..., : found.shape[2], : found.shape[3]]
    at.copy_(torch.maximum(at, found) if isinstance(fact, F.BlockMax) else at + found)


COLLECTORS: dict[type[F.Fact], Callable[[Any, F.Parts, Weights], None]] = {
    F.Rows: _rows, F.TopK: _largest, F.RowMax: _largest, F.ColumnMass: _column_mass, F.Entropy: _entropy,
    F.DistanceHistogram: _distances, F.MassOn: _mass_on, F.BlockMass: _blocks, F.BlockMax: _blocks,
}  # fmt: skip
