"""Facts: statistics of the attention weights that `regard.evidence` computes, and their results.

A fact is an immutable object that can be compared, hashed and printed. It checks the sizes of a
call, allocates its parts (tensors (B, Hq, ...) that a backend fills) and converts the parts to the
result.
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
    """The base class of facts, the statistics of attention weights that `evidence` computes."""

    def check(self, spec: Spec) -> None:
        """Raises ValueError if the fact cannot be computed for the sizes in `spec`."""

    def empty(self, problem: Problem) -> list[Tensor]:
        """Allocates the fact's parts, the tensors that `result` converts, filled with zeros.

        Parts that sum over queries are float64.
        """
        raise NotImplementedError

    def result(self, parts: Parts, spec: Spec) -> Any:
        """Converts the parts to the fact's result.

        The result has the caller's leading dims, and its floats have the dtype of the LSE.
        """
        (part,) = _in_caller_shape(parts, spec)
        return part


@value
class Rows(Fact):
    """Rows of the weight matrix, (..., Hq, R, Lk).

    Args:
        indices: the indices of R queries, or one int. -1 is the last query.
    """

    indices: tuple[int, ...]

    def __init__(self, indices: Any) -> None:
        listed: Any = indices.tolist() if hasattr(indices, "tolist") else indices
        listed = [listed] if is_integer(listed) else listed
        if not isinstance(listed, Sequence | range) or not all(is_integer(i) for i in listed):
            raise TypeError(f"Rows(indices): expected integers, got {describe(indices)}")
        self._set(indices=tuple(int(i) for i in listed))

    def check(self, spec: Spec) -> None:
        for i in self.indices:
            if not -spec.Lq <= i < spec.Lq:
                raise ValueError(f"Rows(indices): expected indices below Lq = {spec.Lq}, got {i}")

    def empty(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem.spec, len(self.indices), problem.spec.Lk)]

    def places(self, Lq: int) -> list[int]:
        """Returns the query indices as non-negative integers."""
        return [i % Lq for i in self.indices]


class TopKResult(NamedTuple):
    """The result of `TopK`.

    If a query may attend to fewer than k keys, the remaining weights are 0 and the remaining keys
    -1.
    """

    weights: Tensor  # (..., Hq, Lq, k)
    keys: Tensor  # (..., Hq, Lq, k) int64


@value
class TopK(Fact):
    """The k largest weights of each query and their keys, in descending order of weight.

    Ties go to the lower key index.
    """

    k: int

    def __init__(self, k: int) -> None:
        self._set(k=count("TopK(k)", k, 1))

    def empty(self, problem: Problem) -> list[Tensor]:
        shape = problem.spec.Lq, self.k
        return [_zeros(problem.spec, *shape), _zeros(problem.spec, *shape, dtype=torch.int64)]

    def result(self, parts: Parts, spec: Spec) -> TopKResult:
        return TopKResult(*_in_caller_shape(parts, spec))


class RowMaxResult(NamedTuple):
    """The result of `RowMax`. For a fully masked row, the weight is 0 and the key is -1."""

    weights: Tensor  # (..., Hq, Lq)
    keys: Tensor  # (..., Hq, Lq) int64


@value
class RowMax(Fact):
    """The largest weight of each query and its key. Ties go to the lower key index."""

    k: ClassVar[int] = 1

    def empty(self, problem: Problem) -> list[Tensor]:
        return TopK(self.k).empty(problem)

    def result(self, parts: Parts, spec: Spec) -> RowMaxResult:
        return RowMaxResult(*(x[..., 0] for x in _in_caller_shape(parts, spec)))


@value
class ColumnMass(Fact):
    """The sum of the attention weights of each key over all queries, (..., Hq, Lk).

    Args:
        weights: float (..., Lq), a factor for the attention weights of each query. Default: all 1.
    """

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
        """Returns the argument `weights` as (1 or B, Lq) in the dtype of the results, or None."""
        return None if self.weights is None else _by_sample(spec, self.weights.to(spec.lse_dtype))


class EntropyResult(NamedTuple):
    """The result of `Entropy`: the entropy in nats, and as a fraction of its largest value."""

    nats: Tensor  # (..., Hq, Lq)
    normalized: Tensor  # nats / log(n), n = allowed keys (plus 1 with a sink); 0 for n < 2


@value
class Entropy(Fact):
    """The entropy of each query's weights, -sum p log p. A sink counts as one more key."""

    def empty(self, problem: Problem) -> list[Tensor]:
        """Allocates two parts: each query's entropy, and its number of keys, including a sink."""
        Lq = problem.spec.Lq
        return [_zeros(problem.spec, Lq), _zeros(problem.spec, Lq, dtype=torch.int64)]

    def result(self, parts: Parts, spec: Spec) -> EntropyResult:
        nats, choices = _in_caller_shape(parts, spec)
        max_nats = choices.clamp(min=2).to(nats.dtype).log()
        return EntropyResult(nats, torch.where(choices > 1, nats / max_nats, 0.0))


class DistanceResult(NamedTuple):
    """The result of `DistanceHistogram`: `mass` is the sum of the weights at each distance."""

    mass: Tensor  # (..., Hq, n)
    distances: Tensor  # (n,) int64, ascending; n = Lq + Lk - 1, more if the samples' offsets differ


@value
class DistanceHistogram(Fact):
    """The sum of the weights at each of n distances, (..., Hq, n).

    The distance of a pair is the query position minus the key position.
    """

    def empty(self, problem: Problem) -> list[Tensor]:
        """Allocates two parts: the mass (B, Hq, n), filled with zeros, and the distances (n,).

        The distances are int64 and ascending.
        """
        spec, offset = problem.spec, problem.offset
        if offset is None:
            first = last = int(spec.offset or 0)
        else:
            first, last = (int(x) for x in torch.aminmax(offset)) if offset.numel() else (0, 0)
        bounds = (first - spec.Lk + 1, last + spec.Lq) if spec.Lq and spec.Lk else (0, 0)
        distances = torch.arange(*bounds, device=spec.device)
        return [_zeros(spec, len(distances), dtype=torch.float64), distances]

    def result(self, parts: Parts, spec: Spec) -> DistanceResult:
        (mass,) = _in_caller_shape(parts[:1], spec)
        return DistanceResult(mass, parts[1])


@value
class MassOn(Fact):
    """The sum of each query's weights over a set of keys, (..., Hq, Lq).

    Args:
        keys: bool (..., Lk), True for keys in the set, or a list of key indices, where -1 is the
            last key.
    """

    keys: Tensor

    def __init__(self, keys: Any) -> None:
        tensor = tensor_of("MassOn(keys)", keys)
        if tensor.dtype != torch.bool and not holds_integers(tensor):
            raise TypeError(
                f"MassOn(keys): expected a bool tensor (..., Lk) or integers, got {describe(keys)}"
            )
        if tensor.ndim == 0 or (tensor.dtype != torch.bool and tensor.ndim > 1):
            raise ValueError(f"MassOn(keys): expected a list of keys or bool (..., Lk), got {describe(keys)}")
        self._set(keys=snapshot(tensor))

    def check(self, spec: Spec) -> None:
        if self.keys.dtype == torch.bool:
            _check_shape("MassOn(keys)", self.keys, (*spec.batch, spec.Lk))
        elif self.keys.numel() and not (-spec.Lk <= int(self.keys.min()) and int(self.keys.max()) < spec.Lk):
            raise ValueError(f"MassOn(keys): expected keys below Lk = {spec.Lk}, got {brief(self.keys)}")

    def empty(self, problem: Problem) -> list[Tensor]:
        return [_zeros(problem.spec, problem.spec.Lq)]

    def by_sample(self, spec: Spec) -> Tensor:
        """Returns `keys` as a bool tensor (1 or B, Lk), True for keys in the set."""
        if self.keys.dtype == torch.bool:
            return _by_sample(spec, self.keys.to(spec.device))
        in_set = torch.zeros(1, spec.Lk, dtype=torch.bool, device=spec.device)
        in_set[0, self.keys.to(spec.device, torch.int64)] = True
        return in_set


class Pyramid(NamedTuple):
    """The weight matrix reduced to one value per block. The block size doubles at each level."""

    levels: list[Tensor]  # (..., Hq, nq, nk), finest first, the last 1 x 1
    block: int  # queries and keys per block in the first level


@value
class BlockMass(Fact):
    """The sum of the weights in each block of `block` queries x `block` keys, as a `Pyramid`.

    The block size doubles at each level.
    """

    block: int

    def __init__(self, block: int) -> None:
        self._set(block=count(f"{type(self).__name__}(block)", block, 1))

    def check(self, spec: Spec) -> None:
        blocks = spec.B * spec.Hq * -(-spec.Lq // self.block) * -(-spec.Lk // self.block)
        if blocks > MAX_BLOCKS:
            name = type(self).__name__
            raise ValueError(
                f"{name}(block): expected at most 2**28 blocks, got {blocks:,}; use a larger block"
            )

    def empty(self, problem: Problem) -> list[Tensor]:
        blocks = (-(-n // self.block) for n in (problem.spec.Lq, problem.spec.Lk))
        return [_zeros(problem.spec, *blocks, dtype=torch.float64)]

    def result(self, parts: Parts, spec: Spec) -> Pyramid:
        levels = _in_caller_shape(parts, spec)
        while max(levels[-1].shape[-2:]) > 1:
            levels.append(self.coarser(levels[-1], 2))
        return Pyramid(levels, self.block)

    @classmethod
    def coarser(cls, x: Tensor, block: int) -> Tensor:
        """Reduces each block of `block` x `block` entries of x (..., nq, nk) to one entry.

        Incomplete blocks at the end are padded with 0.
        """
        nq, nk = x.shape[-2:]
        x = torch.nn.functional.pad(x, (0, -nk % block, 0, -nq % block))
        x = x.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
        return cls._reduced(x)

    @staticmethod
    def _reduced(x: Tensor) -> Tensor:
        return x.sum((-3, -1))


@value
class BlockMax(BlockMass):
    """The largest weight in each block of `block` queries x `block` keys, as a `Pyramid`.

    The block size doubles at each level.
    """

    def empty(self, problem: Problem) -> list[Tensor]:
        return [part.to(problem.spec.lse_dtype) for part in super().empty(problem)]

    @staticmethod
    def _reduced(x: Tensor) -> Tensor:
        return x.amax((-3, -1))


def largest(p: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest visible weights of p (..., n) and their indices, in descending order.

    Ties go to the lower index. If fewer than k weights are visible, the remaining weights are 0 and
    the remaining indices -1.
    """
    p = torch.nn.functional.pad(torch.where(visible, p, -1.0), (0, max(0, k - p.shape[-1])), value=-1.0)
    weights, indices = (x[..., :k] for x in p.sort(dim=-1, descending=True, stable=True))
    missing = weights == -1
    return weights.masked_fill(missing, 0.0), indices.masked_fill(missing, -1)


def _zeros(spec: Spec, *inner: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(spec.B, spec.Hq, *inner, dtype=dtype or spec.lse_dtype, device=spec.device)


def _check_shape(name: str, x: Tensor, target: tuple[int, ...]) -> None:
    if x.ndim == 0 or x.shape[-1] != target[-1] or not broadcasts(tuple(x.shape), target):
        raise ValueError(f"{name}: expected a shape broadcastable to {target}, got {tuple(x.shape)}")


def _by_sample(spec: Spec, x: Tensor) -> Tensor:
    """Returns x, which broadcasts to (*batch, L), with its batch dims flattened: (1 or B, L)."""
    if x.numel() == x.shape[-1]:
        return x.reshape(1, -1)
    return x.expand(*spec.batch, -1).reshape(spec.B, -1)


def _in_caller_shape(parts: Parts, spec: Spec) -> list[Tensor]:
    """Restores the caller's leading dims of each part, and casts floats to the LSE's dtype.

    (B, Hq, ...) becomes (*batch, Hq, ...), or (...) if q is (Lq, D).
    """
    shaped = (x.reshape(*spec.out_shape[:-2], *x.shape[2:]) for x in parts)
    return [x.to(spec.lse_dtype) if x.is_floating_point() else x for x in shaped]
