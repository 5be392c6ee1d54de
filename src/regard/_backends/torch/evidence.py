"""Facts about the weights in plain torch, box by box: each box has whole rows of weights, never all of them.

Takes a canonical problem. A collector gets the weights of one box after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import facts as F
from ..._call.spec import Problem
from ...masks._part import cut
from .boxes import INF, Box, BoxData, parts
from .higher import softmax, stained, times


class Weights(NamedTuple):
    """Those of a box: the keys are box.keys, all others have none."""

    box: Box
    p: Tensor  # (b, h, R, K)
    p_sink: Tensor  # (b, h, R)
    visible: Tensor  # (b, h, R, K)


class Collector:
    """Where a fact is put together: `made` are its parts."""

    def __init__(self, problem: Problem, fact: Any) -> None:
        self.problem, self.spec, self.fact = problem, problem.spec, fact
        self.made: list[Tensor] = self.start()

    def start(self) -> list[Tensor]:
        raise NotImplementedError

    def add(self, w: Weights) -> None:
        raise NotImplementedError

    def parts(self) -> F.Parts:
        return [x.to(self.spec.lse_dtype) if x.is_floating_point() else x for x in self.made]

    def _zeros(self, *inner: int, dtype: torch.dtype | None = None) -> Tensor:
        spec = self.spec
        return torch.zeros(spec.B, spec.Hq, *inner, dtype=dtype or spec.lse_dtype, device=spec.device)

    def _sums(self, *inner: int) -> Tensor:
        """Room for sums over many boxes."""
        return self._zeros(*inner, dtype=torch.float64)


class _Rows(Collector):
    def start(self) -> list[Tensor]:
        self.places = self.fact.places(self.spec.Lq)
        return [self._zeros(len(self.places), self.spec.Lk)]

    def add(self, w: Weights) -> None:
        for n, i in enumerate(self.places):
            if w.box.rows.start <= i < w.box.rows.stop:
                self.made[0][w.box.samples, w.box.heads, n, w.box.keys] = w.p[:, :, i - w.box.rows.start]


class _TopK(Collector):
    def start(self) -> list[Tensor]:
        rows = (self.spec.Lq, self._k)
        return [self._zeros(*rows), self._zeros(*rows, dtype=torch.int64)]

    @property
    def _k(self) -> int:
        return self.fact.k if isinstance(self.fact, F.TopK) else 1

    def add(self, w: Weights) -> None:
        weights, keys = F.largest(w.p, w.visible, self._k)
        self.made[0][w.box.queries] = weights
        self.made[1][w.box.queries] = torch.where(keys < 0, keys, keys + w.box.keys.start)


class _RowMax(_TopK):
    def parts(self) -> F.Parts:
        return [x[..., 0] for x in super().parts()]


class _ColumnMass(Collector):
    def start(self) -> list[Tensor]:
        self.by_row = self.fact.by_sample(self.spec)
        return [self._sums(self.spec.Lk)]

    def add(self, w: Weights) -> None:
        p = w.p
        if self.by_row is not None:
            by_row = cut(self.by_row, w.box.samples, w.box.rows)[:, None, :, None]
            p = torch.where(by_row == 0, 0.0, p * by_row)
        self.made[0][w.box.samples, w.box.heads, w.box.keys] += p.sum(2, dtype=torch.float64)


class _Entropy(Collector):
    def start(self) -> list[Tensor]:
        return [self._zeros(self.spec.Lq), self._zeros(self.spec.Lq, dtype=torch.int64)]

    def add(self, w: Weights) -> None:
        self.made[0][w.box.queries] = torch.special.entr(w.p).sum(-1) + torch.special.entr(w.p_sink)
        self.made[1][w.box.queries] = w.visible.sum(-1) + int(self.spec.sink)


class _DistanceHistogram(Collector):
    def start(self) -> list[Tensor]:
        distances = F.distances_of(self.problem)
        return [self._sums(len(distances)), distances]

    def add(self, w: Weights) -> None:
        mass, distances = self.made
        _, _, rows, keys = w.box.numbers(self.spec.device)
        first = torch.tensor([self.spec.offset]) if self.problem.offset is None else self.problem.offset
        first = cut(first.to(self.spec.device), w.box.samples)[:, None, None, None]
        at = (first + rows[:, None] - keys - distances[:1]).expand_as(w.p).flatten(2)
        mass[w.box.samples, w.box.heads].scatter_add_(2, at, w.p.flatten(2).double())


class _MassOn(Collector):
    def start(self) -> list[Tensor]:
        self.chosen = self.fact.by_sample(self.spec)
        return [self._zeros(self.spec.Lq)]

    def add(self, w: Weights) -> None:
        chosen = cut(self.chosen, w.box.samples)[:, None, None, w.box.keys]
        self.made[0][w.box.queries] = torch.where(chosen, w.p, 0.0).sum(-1)


class _Blocks(Collector):
    """Rows and keys of a box are filled up with zeros, so that blocks begin at multiples of their size."""

    def start(self) -> list[Tensor]:
        return [self._sums(*(-(-n // self.fact.block) for n in (self.spec.Lq, self.spec.Lk)))]

    def add(self, w: Weights) -> None:
        block, (rows, keys) = self.fact.block, (w.box.rows, w.box.keys)
        p = torch.nn.functional.pad(w.p.double(), (keys.start % block, 0, rows.start % block, 0))
        found = self.fact.coarser(p, block)
        where = [
            slice(s.start // block, s.start // block + n)
            for s, n in zip((rows, keys), found.shape[2:], strict=True)
        ]
        at = self.made[0][w.box.samples, w.box.heads, where[0], where[1]]
        at.copy_(torch.maximum(at, found) if isinstance(self.fact, F.BlockMax) else at + found)


COLLECTORS: dict[type[F.Fact], type[Collector]] = {
    F.Rows: _Rows, F.TopK: _TopK, F.RowMax: _RowMax, F.ColumnMass: _ColumnMass, F.Entropy: _Entropy,
    F.DistanceHistogram: _DistanceHistogram, F.MassOn: _MassOn, F.BlockMass: _Blocks, F.BlockMax: _Blocks,
}  # fmt: skip


def evidence(problem: Problem, want: Sequence[F.Fact]) -> list[F.Parts]:
    """The parts of each fact, (B, Hq, ...); integers as they are, others in the dtype of the LSE."""
    collectors = [COLLECTORS[type(fact)](problem, fact) for fact in want]
    with torch.autocast(problem.spec.device.type, enabled=False):
        for part in parts(problem, (None,) * 6, None, None):
            weights = _weights(part)
            for collector in collectors:
                collector.add(weights)
    return [collector.parts() for collector in collectors]


def _weights(part: BoxData) -> Weights:
    x, cap = part.x, part.spec.softcap
    s = times(x.q, x.k.mT)
    if cap is not None:
        s = torch.tanh(s / cap) * cap
    for more in (x.bias, part.taint):
        s = s if more is None else s + more
    visible = torch.ones_like(s, dtype=torch.bool) if part.visible is None else part.visible.expand_as(s)
    p, p_sink, bad = softmax(torch.where(visible, s, -INF), x.sink)
    return Weights(part.box, stained(p, bad, visible), stained(p_sink, bad, None)[..., 0], visible)
