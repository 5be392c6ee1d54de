"""Facts about the weights of attention that can be asked of `regard.evidence`, and their results.

A fact is a value: frozen, comparable, hashable, printable. It owns its check, its parts, tensors (B, Hq, ...)
that a backend fills, and how they become the result that the caller gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ._call.spec import Problem, Spec
from ._tools.arguments import (
    brief,
    broadcasts,
    count,
    describe,
    holds_integers,
    is_integer,
    snapshot,
    tensor_of,
)
from ._tools.values import Value, value

MAX_BLOCKS = 2**28

Parts = Sequence[Tensor]


@value
class Fact(Value):
    """What every fact can do."""

    def check(self, spec: Spec) -> None:
        """Raises ValueError if the fact cannot be asked of a call of these sizes."""

    def empty(self, problem: Problem) -> list[Tensor]:
        """The parts as zeros. What is summed over many queries is in float64."""
        raise NotImplementedError

    def result(self, parts: Parts, spec: Spec) -> Any:
        """What the caller gets: the parts with its own outer dims, rounded to the dtype of the LSE."""
        (part,) = _outside(parts, spec)
        return part


@value
class Rows(Fact):
    """Whole rows of the matrix of weights, (..., Hq, R, Lk), for the queries `indices`: -1 is the last."""

    indices: tuple[int, ...]

    def __init__(self, indices: Any) -> None:
        given: Any = indices.tolist() if hasattr(indices, "tolist") else indices
        listed = [given] if is_integer(given) else given
        if not isinstance(listed, Sequence | range) or not all(is_integer(i) for i in listed):
            raise TypeError(f"Rows(indices): expected integers, got {describe(indices)}")
        self._set(indices=tuple(int(i) for i in listed))

    def check(self, spec: Spec) -> None:
        for i in self.indices:
            if not -spec.Lq <= i < spec.Lq:
                raise ValueError(f"Rows(indices): expected queries below Lq = {spec.Lq}, got {i}")

    def empty(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem.spec, len(self.indices), problem.spec.Lk)]

    def places(self, Lq: int) -> list[int]:
        return [i % Lq for i in self.indices]


class TopKResult(NamedTuple):
    weights: Tensor  # (..., Hq, Lq, k); 0 where fewer keys are allowed
    keys: Tensor  # (..., Hq, Lq, k) int64; -1 where fewer keys are allowed


@value
class TopK(Fact):
    """The k largest weights of each query and their keys, by falling weight, ties by the lower key."""

    k: int

    def __init__(self, k: int) -> None:
        self._set(k=count("TopK(k)", k, 1))

    def empty(self, problem: Problem) -> list[Tensor]:
        rows = problem.spec.Lq, self.k
        return [_zeros(problem.spec, *rows), _zeros(problem.spec, *rows, dtype=torch.int64)]

    def result(self, parts: Parts, spec: Spec) -> TopKResult:
        return TopKResult(*_outside(parts, spec))


class RowMaxResult(NamedTuple):
    weights: Tensor  # (..., Hq, Lq); 0 where no key is allowed
    keys: Tensor  # (..., Hq, Lq) int64; -1 where no key is allowed


@value
class RowMax(Fact):
    """The largest weight of each query and its key. Its parts are those of TopK(1)."""

    k: ClassVar[int] = 1

    def empty(self, problem: Problem) -> list[Tensor]:
        return TopK(self.k).empty(problem)

    def result(self, parts: Parts, spec: Spec) -> RowMaxResult:
        return RowMaxResult(*(x[..., 0] for x in _outside(parts, spec)))


@value
class ColumnMass(Fact):
    """What each key gets from all queries, (..., Hq, Lk); with `weights` (..., Lq) query i counts so much."""

    weights: Tensor | None

    def __init__(self, weights: Tensor | None = None) -> None:
        if weights is not None and not (isinstance(weights, Tensor) and weights.is_floating_point()):
            raise TypeError(
                f"ColumnMass(weights): expected a float tensor (..., Lq), got {describe(weights)}"
            )
        self._set(weights=None if weights is None else snapshot(weights))

    def check(self, spec: Spec) -> None:
        if self.weights is not None:
            _check_shape("ColumnMass(weights)", self.weights, (*spec.batch, spec.Lq))

    def empty(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem.spec, problem.spec.Lk, dtype=torch.float64)]

    def by_sample(self, spec: Spec) -> Tensor | None:
        """(1 or B, Lq) in the dtype of the results."""
        return None if self.weights is None else _by_sample(spec, self.weights.to(spec.lse_dtype))


class EntropyResult(NamedTuple):
    nats: Tensor  # (..., Hq, Lq)
    normalized: Tensor  # divided by the log of the number of allowed keys (and the sink); 0 for at most one


@value
class Entropy(Fact):
    """How spread the weights of each query are: -sum of p log p; with a sink, its own term is in the sum."""

    def empty(self, problem: Problem) -> list[Tensor]:
        """The nats, and the number of allowed keys (and the sink)."""
        Lq = problem.spec.Lq
        return [_zeros(problem.spec, Lq), _zeros(problem.spec, Lq, dtype=torch.int64)]

    def result(self, parts: Parts, spec: Spec) -> EntropyResult:
        nats, choices = _outside(parts, spec)
        most = choices.clamp(min=2).to(nats.dtype).log()
        return EntropyResult(nats, torch.where(choices > 1, nats / most, 0.0))


class DistanceResult(NamedTuple):
    mass: Tensor  # (..., Hq, n)
    distances: Tensor  # (n,) int64, ascending; n = Lq + Lk - 1, more if samples have offsets of their own


@value
class DistanceHistogram(Fact):
    """The mass at each distance, query's position less key's."""

    def empty(self, problem: Problem) -> list[Tensor]:
        """The mass, and every distance that occurs, int64 (n,), ascending."""
        spec, offset = problem.spec, problem.offset
        if offset is None:
            first = last = int(spec.offset or 0)
        else:
            first, last = (int(x) for x in torch.aminmax(offset)) if offset.numel() else (0, 0)
        ends = (first - spec.Lk + 1, last + spec.Lq) if spec.Lq and spec.Lk else (0, 0)
        distances = torch.arange(*ends, device=spec.device)
        return [_zeros(spec, len(distances), dtype=torch.float64), distances]

    def result(self, parts: Parts, spec: Spec) -> DistanceResult:
        (mass,) = _outside(parts[:1], spec)
        return DistanceResult(mass, parts[1])


@value
class MassOn(Fact):
    """What each query gives to some keys, (..., Hq, Lq): bool (..., Lk), or a list of keys (-1: the last)."""

    keys: Tensor

    def __init__(self, keys: Any) -> None:
        given = tensor_of("MassOn(keys)", keys)
        if given.dtype != torch.bool and not holds_integers(given):
            raise TypeError(
                f"MassOn(keys): expected a bool tensor (..., Lk) or integers, got {describe(keys)}"
            )
        if given.ndim == 0 or (given.dtype != torch.bool and given.ndim > 1):
            raise ValueError(f"MassOn(keys): expected a list of keys or bool (..., Lk), got {describe(keys)}")
        self._set(keys=snapshot(given))

    def check(self, spec: Spec) -> None:
        if self.keys.dtype == torch.bool:
            _check_shape("MassOn(keys)", self.keys, (*spec.batch, spec.Lk))
        elif self.keys.numel() and not (-spec.Lk <= int(self.keys.min()) and int(self.keys.max()) < spec.Lk):
            raise ValueError(f"MassOn(keys): expected keys below Lk = {spec.Lk}, got {brief(self.keys)}")

    def empty(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem.spec, problem.spec.Lq)]

    def by_sample(self, spec: Spec) -> Tensor:
        """bool (1 or B, Lk)"""
        if self.keys.dtype == torch.bool:
            return _by_sample(spec, self.keys.to(spec.device))
        chosen = torch.zeros(1, spec.Lk, dtype=torch.bool, device=spec.device)
        chosen[0, self.keys.to(spec.device, torch.int64)] = True
        return chosen


class Pyramid(NamedTuple):
    """Blocks of the matrix of weights at every size: a block is made of four of the level before."""

    levels: list[Tensor]  # (..., Hq, nq, nk), finest first, the last 1 x 1
    block: int  # queries and keys of a block in the first level


@value
class BlockMass(Fact):
    """The sum of the weights in blocks of `block` queries by `block` keys, and of twice that, and so on."""

    block: int

    def __init__(self, block: int) -> None:
        self._set(block=count(f"{type(self).__name__}(block)", block, 1))

    def check(self, spec: Spec) -> None:
        blocks = spec.B * spec.Hq * -(-spec.Lq // self.block) * -(-spec.Lk // self.block)
        if blocks > MAX_BLOCKS:
            name = type(self).__name__
            raise ValueError(
                f"{name}(block): expected at most 2**28 blocks, got {blocks:,}; take larger ones"
            )

    def empty(self, problem: Problem) -> list[Tensor]:
        blocks = (-(-n // self.block) for n in (problem.spec.Lq, problem.spec.Lk))
        return [_zeros(problem.spec, *blocks, dtype=torch.float64)]

    def result(self, parts: Parts, spec: Spec) -> Pyramid:
        levels = _outside(parts, spec)
        while max(levels[-1].shape[-2:]) > 1:
            levels.append(self.coarser(levels[-1], 2))
        return Pyramid(levels, self.block)

    @classmethod
    def coarser(cls, x: Tensor, block: int) -> Tensor:
        """Blocks of (..., nq, nk), the last ones filled up with zeros, as one number each."""
        nq, nk = x.shape[-2:]
        x = torch.nn.functional.pad(x, (0, -nk % block, 0, -nq % block))
        x = x.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
        return cls._gathered(x)

    @staticmethod
    def _gathered(x: Tensor) -> Tensor:
        return x.sum((-3, -1))


@value
class BlockMax(BlockMass):
    """The largest weight in blocks of `block` queries by `block` keys, and of twice that, and so on."""

    def empty(self, problem: Problem) -> list[Tensor]:
        return [part.to(problem.spec.lse_dtype) for part in super().empty(problem)]

    @staticmethod
    def _gathered(x: Tensor) -> Tensor:
        return x.amax((-3, -1))


def largest(p: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of weights p (..., n), the k largest and where they are: by falling weight, ties by the lower place.

    Where fewer are visible, 0 and -1.
    """
    p = torch.nn.functional.pad(torch.where(visible, p, -1.0), (0, max(0, k - p.shape[-1])), value=-1.0)
    weights, places = (x[..., :k] for x in p.sort(dim=-1, descending=True, stable=True))
    nothing = weights == -1
    return weights.masked_fill(nothing, 0.0), places.masked_fill(nothing, -1)


def _zeros(spec: Spec, *inner: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(spec.B, spec.Hq, *inner, dtype=dtype or spec.lse_dtype, device=spec.device)


def _check_shape(name: str, x: Tensor, target: tuple[int, ...]) -> None:
    if x.ndim == 0 or x.shape[-1] != target[-1] or not broadcasts(tuple(x.shape), target):
        raise ValueError(f"{name}: expected a shape broadcastable to {target}, got {tuple(x.shape)}")


def _by_sample(spec: Spec, x: Tensor) -> Tensor:
    """(..., L), broadcastable to (*batch, L), as (1 or B, L)."""
    if x.numel() == x.shape[-1]:
        return x.reshape(1, -1)
    return x.expand(*spec.batch, -1).reshape(spec.B, -1)


def _outside(parts: Parts, spec: Spec) -> list[Tensor]:
    """Restores the caller's outer dims, (B, Hq, ...) -> (*outer, ...), and rounds to the dtype of the LSE."""
    shaped = (x.reshape(*spec.out_shape[:-2], *x.shape[2:]) for x in parts)
    return [x.to(spec.lse_dtype) if x.is_floating_point() else x for x in shaped]
