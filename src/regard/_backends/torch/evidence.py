"""PyTorch implementation of evidence, tile by tile, so that the whole matrix of weights never exists.

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
from .higher import softmax, spread_nan, times
from .tiles import INF, Tile, TileData, parts


class Weights(NamedTuple):
    """The weights in a tile. Keys outside `tile.keys` have none."""

    problem: Problem
    tile: Tile
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


def _weights(problem: Problem, part: TileData) -> Weights:
    x, cap = part.x, part.spec.softcap
    s = times(x.q, x.k.mT)
    if cap is not None:
        s = torch.tanh(s / cap) * cap
    for more in (x.bias, part.nonfinite):
        s = s if more is None else s + more
    visible = torch.ones_like(s, dtype=torch.bool) if part.visible is None else part.visible.expand_as(s)
    p, p_sink, bad = softmax(torch.where(visible, s, -INF), x.sink)
    return Weights(
        problem, part.tile, spread_nan(p, bad, visible), spread_nan(p_sink, bad, None)[..., 0], visible
    )


# Collectors: each adds the weights of one tile to the parts of a fact


def _rows(fact: F.Rows, made: F.Parts, w: Weights) -> None:
    samples, heads, rows = w.tile.queries
    for n, i in enumerate(fact.places(w.problem.spec.Lq)):
        if rows.start <= i < rows.stop:
            made[0][samples, heads, n, w.tile.keys] = w.p[:, :, i - rows.start]


def _largest(fact: F.TopK | F.RowMax, made: F.Parts, w: Weights) -> None:
    weights, keys = F.largest(w.p, w.visible, fact.k)
    made[0][w.tile.queries] = weights
    made[1][w.tile.queries] = torch.where(keys < 0, keys, keys + w.tile.keys.start)


def _column_mass(fact: F.ColumnMass, made: F.Parts, w: Weights) -> None:
    p, by_row = w.p, fact.by_sample(w.problem.spec)
    if by_row is not None:
        by_row = cut(by_row, w.tile.samples, w.tile.rows)[:, None, :, None]
        p = torch.where(by_row == 0, 0.0, p * by_row)
    made[0][w.tile.samples, w.tile.heads, w.tile.keys] += p.sum(2, dtype=torch.float64)


def _entropy(fact: F.Entropy, made: F.Parts, w: Weights) -> None:
    made[0][w.tile.queries] = torch.special.entr(w.p).sum(-1) + torch.special.entr(w.p_sink)
    made[1][w.tile.queries] = w.visible.sum(-1) + int(w.problem.spec.sink)


def _distances(fact: F.DistanceHistogram, made: F.Parts, w: Weights) -> None:
    (mass, distances), spec, offset = made, w.problem.spec, w.problem.offset
    _, _, rows, keys = w.tile.numbers(spec.device)
    first = torch.tensor([spec.offset]) if offset is None else offset
    first = cut(first.to(spec.device), w.tile.samples)[:, None, None, None]
    at = (first + rows[:, None] - keys - distances[:1]).expand_as(w.p).flatten(2)
    mass[w.tile.samples, w.tile.heads].scatter_add_(2, at, w.p.flatten(2).double())


def _mass_on(fact: F.MassOn, made: F.Parts, w: Weights) -> None:
    chosen = cut(fact.by_sample(w.problem.spec), w.tile.samples)[:, None, None, w.tile.keys]
    made[0][w.tile.queries] = torch.where(chosen, w.p, 0.0).sum(-1)


def _blocks(fact: F.BlockMass, made: F.Parts, w: Weights) -> None:
    """Rows and keys of the tile are filled up with zeros, so that blocks begin at multiples of their size."""
    (whole,), block, (rows, keys) = made, fact.block, (w.tile.rows, w.tile.keys)
    p = torch.nn.functional.pad(w.p.double(), (keys.start % block, 0, rows.start % block, 0))
    found = fact.coarser(p, block)
    first_row, first_key = rows.start // block, keys.start // block
    at = whole[w.tile.samples, w.tile.heads, first_row:, first_key:][..., : found.shape[2], : found.shape[3]]
    at.copy_(torch.maximum(at, found) if isinstance(fact, F.BlockMax) else at + found)


COLLECTORS: dict[type[F.Fact], Callable[[Any, F.Parts, Weights], None]] = {
    F.Rows: _rows, F.TopK: _largest, F.RowMax: _largest, F.ColumnMass: _column_mass, F.Entropy: _entropy,
    F.DistanceHistogram: _distances, F.MassOn: _mass_on, F.BlockMass: _blocks, F.BlockMax: _blocks,
}  # fmt: skip
