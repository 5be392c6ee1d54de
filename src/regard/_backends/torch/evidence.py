"""Evidence in PyTorch operations, tile by tile, so that the full matrix of weights never exists.

All functions expect a canonical Problem.
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
from .tiles import INF, Tile, TileData, tiles


class Weights(NamedTuple):
    """The weights of a tile: b samples, h query heads, R query rows and K keys.

    `tile.keys` is the range of these K keys. The weights of all other keys are zero.
    """

    problem: Problem
    tile: Tile
    p: Tensor  # (b, h, R, K)
    p_sink: Tensor  # (b, h, R): the weights of the sink
    visible: Tensor  # (b, h, R, K)


def evidence(problem: Problem, want: Sequence[F.Fact]) -> list[F.Parts]:
    """Computes each fact's parts: the tensors from which `Fact.result` makes the fact's result."""
    results = [fact.empty(problem) for fact in want]
    with torch.autocast(problem.spec.device.type, enabled=False):
        for data in tiles(problem, (None,) * 6, None, None):
            weights = _weights(problem, data)
            for fact, parts in zip(want, results, strict=True):
                COLLECTORS[type(fact)](fact, parts, weights)
    return list(results)


def _weights(problem: Problem, data: TileData) -> Weights:
    x, cap = data.x, data.spec.softcap
    s = times(x.q, x.k.mT)
    if cap is not None:
        s = torch.tanh(s / cap) * cap
    for term in (x.bias, data.nonfinite):
        s = s if term is None else s + term
    visible = torch.ones_like(s, dtype=torch.bool) if data.visible is None else data.visible.expand_as(s)
    p, p_sink, nan_rows = softmax(torch.where(visible, s, -INF), x.sink)
    p, p_sink = spread_nan(p, nan_rows, visible), spread_nan(p_sink, nan_rows, None)[..., 0]
    return Weights(problem, data.tile, p, p_sink, visible)


# Collectors: each adds the weights of one tile to the parts of a fact, in place


def _rows(fact: F.Rows, parts: F.Parts, w: Weights) -> None:
    samples, heads, rows = w.tile.queries
    for n, i in enumerate(fact.places(w.problem.spec.Lq)):
        if rows.start <= i < rows.stop:
            parts[0][samples, heads, n, w.tile.keys] = w.p[:, :, i - rows.start]


def _largest(fact: F.TopK | F.RowMax, parts: F.Parts, w: Weights) -> None:
    weights, keys = F.largest(w.p, w.visible, fact.k)
    parts[0][w.tile.queries] = weights
    parts[1][w.tile.queries] = torch.where(keys < 0, keys, keys + w.tile.keys.start)


def _column_mass(fact: F.ColumnMass, parts: F.Parts, w: Weights) -> None:
    p, row_weights = w.p, fact.by_sample(w.problem.spec)
    if row_weights is not None:
        row_weights = cut(row_weights, w.tile.samples, w.tile.rows)[:, None, :, None]
        p = torch.where(row_weights == 0, 0.0, p * row_weights)
    parts[0][w.tile.samples, w.tile.heads, w.tile.keys] += p.sum(2, dtype=torch.float64)


def _entropy(fact: F.Entropy, parts: F.Parts, w: Weights) -> None:
    parts[0][w.tile.queries] = torch.special.entr(w.p).sum(-1) + torch.special.entr(w.p_sink)
    parts[1][w.tile.queries] = w.visible.sum(-1) + int(w.problem.spec.sink)


def _distances(fact: F.DistanceHistogram, parts: F.Parts, w: Weights) -> None:
    (mass, distances), spec, offset = parts, w.problem.spec, w.problem.offset
    _, _, rows, keys = w.tile.indices(spec.device)
    first = torch.tensor([spec.offset]) if offset is None else offset
    first = cut(first.to(spec.device), w.tile.samples)[:, None, None, None]
    bins = (first + rows[:, None] - keys - distances[:1]).expand_as(w.p).flatten(2)
    mass[w.tile.samples, w.tile.heads].scatter_add_(2, bins, w.p.flatten(2).double())


def _mass_on(fact: F.MassOn, parts: F.Parts, w: Weights) -> None:
    chosen = cut(fact.by_sample(w.problem.spec), w.tile.samples)[:, None, None, w.tile.keys]
    parts[0][w.tile.queries] = torch.where(chosen, w.p, 0.0).sum(-1)


def _blocks(fact: F.BlockMass, parts: F.Parts, w: Weights) -> None:
    """Adds the weights of a tile to a `BlockMass`, or updates the maxima of a `BlockMax`.

    The tile is padded in front with zeros, so that it begins at the start of a block.
    """
    (masses,), block, (rows, keys) = parts, fact.block, (w.tile.rows, w.tile.keys)
    p = torch.nn.functional.pad(w.p.double(), (keys.start % block, 0, rows.start % block, 0))
    blocks = fact.coarser(p, block)
    first_row, first_key = rows.start // block, keys.start // block
    view = masses[w.tile.samples, w.tile.heads, first_row:, first_key:]
    view = view[..., : blocks.shape[2], : blocks.shape[3]]
    view.copy_(torch.maximum(view, blocks) if isinstance(fact, F.BlockMax) else view + blocks)


COLLECTORS: dict[type[F.Fact], Callable[[Any, F.Parts, Weights], None]] = {
    F.Rows: _rows, F.TopK: _largest, F.RowMax: _largest, F.ColumnMass: _column_mass, F.Entropy: _entropy,
    F.DistanceHistogram: _distances, F.MassOn: _mass_on, F.BlockMass: _blocks, F.BlockMax: _blocks,
}  # fmt: skip
