"""Facts about the weights of attention that can be asked of `regard.evidence`, and their results.

A fact is a value: frozen, comparable, hashable, printable. Backends give a fact's parts, tensors
(B, Hq, ...); `result` makes of them what the caller gets, with the caller's own outer dims (..., Hq).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

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
    same,
    snapshot,
    tensor_of,
)

MAX_BLOCKS = 2**28

Parts = Sequence[Tensor]
Outer = tuple[int, ...]
F = TypeVar("F", bound="Fact")


@dataclass(frozen=True, eq=False, repr=False)
class Fact:
    """What every fact can do."""

    def check(self, spec: Spec) -> None:
        """Raise ValueError if the fact cannot be asked of a call of these sizes."""

    def result(self, parts: Parts, outer: Outer) -> Any:
        (part,) = parts
        return _outside(part, outer)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            _equal(mine, theirs) for mine, theirs in zip(self._contents(), other._contents(), strict=True)
        )

    def __hash__(self) -> int:
        shapes = (tuple(x.shape) if isinstance(x, Tensor) else x for x in self._contents())
        return hash((type(self).__name__, *shapes))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(brief(x) for x in self._contents() if x is not None)})"

    def _contents(self) -> Iterator[Any]:
        return (getattr(self, f.name) for f in fields(self))

    def _set(self, **content: object) -> None:
        self.__dict__.update(content)


def value(cls: type[F]) -> type[F]:
    return dataclass(frozen=True, eq=False, repr=False, init=False)(cls)


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

    def places(self, Lq: int) -> list[int]:
        return [i % Lq for i in self.indices]


@value
class TopK(Fact):
    """The k largest weights of each query and their keys, by falling weight, ties by the lower key."""

    class Result(NamedTuple):
        weights: Tensor  # (..., Hq, Lq, k); 0 where fewer keys are allowed
        keys: Tensor  # (..., Hq, Lq, k) int64; -1 where fewer keys are allowed

    k: int

    def __init__(self, k: int) -> None:
        self._set(k=count("TopK(k)", k, 1))

    def result(self, parts: Parts, outer: Outer) -> TopK.Result:
        return TopK.Result(*(_outside(x, outer) for x in parts))


@value
class RowMax(Fact):
    """The largest weight of each query and its key."""

    class Result(NamedTuple):
        weights: Tensor  # (..., Hq, Lq); 0 where no key is allowed
        keys: Tensor  # (..., Hq, Lq) int64; -1 where no key is allowed

    def result(self, parts: Parts, outer: Outer) -> RowMax.Result:
        return RowMax.Result(*(_outside(x, outer) for x in parts))


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

    def by_sample(self, spec: Spec) -> Tensor | None:
        """(1 or B, Lq) in the dtype of the results."""
        return None if self.weights is None else _by_sample(spec, self.weights.to(spec.lse_dtype))


@value
class Entropy(Fact):
    """How spread the weights of each query are: -sum of p log p; with a sink, its own term is in the sum."""

    class Result(NamedTuple):
        nats: Tensor  # (..., Hq, Lq)
        normalized: (
            Tensor  # divided by the log of the number of allowed keys (and the sink); 0 for at most one
        )

    def result(self, parts: Parts, outer: Outer) -> Entropy.Result:
        nats, choices = (_outside(x, outer) for x in parts)
        most = choices.clamp(min=2).to(nats.dtype).log()
        return Entropy.Result(nats, torch.where(choices > 1, nats / most, 0.0))


@value
class DistanceHistogram(Fact):
    """The mass at each distance, query's position less key's."""

    class Result(NamedTuple):
        mass: Tensor  # (..., Hq, n)
        distances: Tensor  # (n,) int64, ascending; n = Lq + Lk - 1, more if samples have offsets of their own

    def result(self, parts: Parts, outer: Outer) -> DistanceHistogram.Result:
        mass, distances = parts
        return DistanceHistogram.Result(_outside(mass, outer), distances)


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

    def result(self, parts: Parts, outer: Outer) -> Pyramid:
        (finest,) = parts
        levels = [finest]
        while max(levels[-1].shape[-2:]) > 1:
            levels.append(self.coarser(levels[-1], 2))
        return Pyramid([_outside(x, outer) for x in levels], self.block)

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


def distances_of(problem: Problem) -> Tensor:
    """Every distance that occurs, int64 (n,), ascending."""
    spec, offset = problem.spec, problem.offset
    if offset is None:
        first = last = int(spec.offset or 0)
    else:
        first, last = (int(x) for x in torch.aminmax(offset)) if offset.numel() else (0, 0)
    if not spec.Lq or not spec.Lk:
        return torch.arange(0, device=spec.device)
    return torch.arange(first - spec.Lk + 1, last + spec.Lq, device=spec.device)


def _check_shape(name: str, x: Tensor, target: tuple[int, ...]) -> None:
    if x.ndim == 0 or x.shape[-1] != target[-1] or not broadcasts(tuple(x.shape), target):
        raise ValueError(f"{name}: expected a shape broadcastable to {target}, got {tuple(x.shape)}")


def _by_sample(spec: Spec, x: Tensor) -> Tensor:
    """(..., L), broadcastable to (*batch, L), as (1 or B, L)."""
    if x.numel() == x.shape[-1]:
        return x.reshape(1, -1)
    return x.expand(*spec.batch, -1).reshape(spec.B, -1)


def _outside(x: Tensor, outer: Outer) -> Tensor:
    """(B, Hq, ...) -> (*outer, ...)"""
    return x.reshape(*outer, *x.shape[2:])


def _equal(a: Any, b: Any) -> bool:
    return same(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a is b or a == b)
