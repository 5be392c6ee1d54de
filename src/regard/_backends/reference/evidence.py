"""Evidence from the full matrix of weights, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import facts as F
from ..._call.spec import Problem
from .attention import INF, _sink, _softmax


class Matrix(NamedTuple):
    """The full matrix of weights of a call."""

    problem: Problem
    visible: Tensor  # (B, Hq, Lq, Lk)
    p: Tensor  # (B, Hq, Lq, Lk): the weights, 0 where masked
    p_sink: Tensor  # (B, Hq, Lq): the weight of the sink


def evidence(problem: Problem, want: Sequence[F.Fact]) -> list[F.Parts]:
    """Computes each fact's parts: the tensors from which `Fact.result` makes the fact's result."""
    visible, p, lse = _softmax(problem)
    p = torch.where(visible, p, 0.0)
    p_sink = torch.where(lse == -INF, 0.0, torch.exp(_sink(problem)[..., 0] - lse))
    matrix = Matrix(problem, visible, p, p_sink)
    return [FACTS[type(fact)](matrix, fact) for fact in want]


def _rows(m: Matrix, fact: F.Rows) -> F.Parts:
    return (m.p[:, :, fact.places(m.problem.spec.Lq)],)


def _largest(m: Matrix, fact: F.TopK | F.RowMax) -> F.Parts:
    return F.largest(m.p, m.visible, fact.k)


def _column_mass(m: Matrix, fact: F.ColumnMass) -> F.Parts:
    row_weights = fact.by_sample(m.problem.spec)
    if row_weights is None:
        return (m.p.sum(2),)
    # A query whose factor is 0 contributes nothing, even if its attention weights are NaN.
    row_weights = row_weights.double()[:, None, :, None]
    return (torch.where(row_weights == 0, 0.0, m.p * row_weights).sum(2),)


def _entropy(m: Matrix, fact: F.Entropy) -> F.Parts:
    nats = torch.special.entr(m.p).sum(-1) + torch.special.entr(m.p_sink)
    return nats, m.visible.sum(-1) + int(m.problem.sink is not None)


def _distance_histogram(m: Matrix, fact: F.DistanceHistogram) -> F.Parts:
    spec, (mass, distances) = m.problem.spec, fact.empty(m.problem)
    if not len(distances):
        return mass, distances
    first = m.problem.offset if m.problem.offset is not None else torch.tensor([spec.offset])
    i, j = (torch.arange(n, device=spec.device) for n in (spec.Lq, spec.Lk))
    bins = first.to(spec.device)[:, None, None] + i[:, None] - j - distances[0]  # (1 or B, Lq, Lk)
    return mass.scatter_add(2, bins[:, None].expand_as(m.p).flatten(2), m.p.flatten(2)), distances


def _mass_on(m: Matrix, fact: F.MassOn) -> F.Parts:
    chosen = fact.by_sample(m.problem.spec)[:, None, None]
    return (torch.where(chosen, m.p, 0.0).sum(-1),)


def _blocks(m: Matrix, fact: F.BlockMass) -> F.Parts:
    return (fact.coarser(m.p, fact.block),)


FACTS: dict[type[F.Fact], Callable[[Matrix, Any], F.Parts]] = {
    F.Rows: _rows, F.TopK: _largest, F.RowMax: _largest, F.ColumnMass: _column_mass, F.Entropy: _entropy,
    F.DistanceHistogram: _distance_histogram, F.MassOn: _mass_on, F.BlockMass: _blocks, F.BlockMax: _blocks,
}  # fmt: skip
