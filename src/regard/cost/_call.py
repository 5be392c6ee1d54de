"""The cost of one call of `regard.attention`, from its shapes and its mask alone."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from .._api.plan import COUNTED
from .._backends.native import attention as _native, core
from .._call.make import make
from .._call.spec import Options, Problem, Spec
from .._tools.arguments import count
from ..masks import Mask


@dataclass(frozen=True)
class Flops:
    """Multiplications and additions of the products of attention, by what is counted.

    The conventions differ in the pairs of a query and a key: all of them; the exact triangle below the
    diagonal; those that the mask leaves; those that the kernels compute, in panels of query rows.
    """

    dense: int = 0
    causal: int = 0
    visible: int = 0
    executed: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def times(self, n: int) -> Flops:
        return Flops(*(n * value for value in astuple(self)))

    def plus(self, n: int) -> Flops:
        return Flops(*(n + value for value in astuple(self)))

    @property
    def halved(self) -> int:
        """Half of all pairs: how the FlashAttention papers count causal attention."""
        return self.dense // 2


@dataclass(frozen=True)
class CallCost:
    """The cost of one call. Bytes count every tensor once."""

    pairs: Flops  # as if a pair cost one
    forward: Flops
    backward: Flops  # five products: the scores are computed again
    read_bytes: int  # q, k, v, bias and the mask's tensors
    written_bytes: int
    saved_bytes: int  # kept for backward, inputs and result included
    scratch_bytes: int  # working memory of all threads, forward
    decodes: bool  # few query rows: cut along the keys
    tasks: int  # that threads share


@dataclass(frozen=True)
class CallSpec:
    """The shapes of a call: q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv).

    Args:
        Hkv, Lk, Dv: default Hq, Lq, D.
        mask, dtype: as in `regard.attention`; the last query stands at the last key.
        bias: the shape of a bias in float32, such as (1, Hq, Lq, Lk).
        shared: values are the first Dv channels of the keys, in the same memory (absorbed latent attention).
    """

    B: int = 1
    Hq: int = 1
    Lq: int = 1
    D: int = 64
    Hkv: int | None = None
    Lk: int | None = None
    Dv: int | None = None
    dtype: torch.dtype = torch.float32
    mask: Mask | None = None
    bias: tuple[int, ...] | None = None
    shared: bool = False

    def cost(self) -> CallCost:
        problem = self._problem()
        spec = problem.spec
        pairs, scratch, tasks = self._pairs(problem)
        size, rows = spec.dtype.itemsize, spec.B * spec.Hq * spec.Lq
        given = _bytes(problem.q, problem.k, *(() if self.shared else (problem.v,)))
        given += _bytes(*problem.tensors) + 4 * math.prod(self.bias or (0,))
        out, stats = rows * spec.Dv * size, 2 * rows * spec.lse_dtype.itemsize
        rest = out if size == 2 else 0
        return CallCost(
            pairs=pairs, forward=pairs.times(2 * (spec.D + spec.Dv)),
            backward=pairs.times(2 * (3 * spec.D + 2 * spec.Dv)), read_bytes=given, written_bytes=out,
            saved_bytes=given + out + stats + rest, scratch_bytes=scratch,
            decodes=core.reason_unavailable() is None and _native.decodes(problem), tasks=tasks,
        )  # fmt: skip

    def _problem(self) -> Problem:
        """Of tensors without memory."""
        B, Hq, Lq, D = (count(name, getattr(self, name), 1) for name in ("B", "Hq", "Lq", "D"))
        given = (("Hkv", self.Hkv, Hq), ("Lk", self.Lk, Lq), ("Dv", self.Dv, D))
        Hkv, Lk, Dv = (count(name, own if size is None else size, 1) for name, size, own in given)
        q, k = _empty((B, Hq, Lq, D), self.dtype), _empty((B, Hkv, Lk, D), self.dtype)
        if self.shared and Dv > D:
            raise ValueError(f"Dv: expected at most D = {D} where values are a part of the keys, got {Dv}")
        v = k[..., :Dv] if self.shared else _empty((B, Hkv, Lk, Dv), self.dtype)
        bias = None if self.bias is None else _empty(self.bias, torch.float32)
        return make(q, k, v, Options(mask=self.mask, bias=bias))

    def _pairs(self, problem: Problem) -> tuple[Flops, int, int]:
        """The pairs, bytes of scratch, and tasks. Without the compiled core nothing is left out."""
        spec = problem.spec
        heads, n = spec.B * spec.Hq, min(spec.Lq, spec.Lk)
        full = heads * spec.Lq * spec.Lk
        triangle = heads * (n * (spec.Lk - n) + n * (n + 1) // 2)
        if core.reason_unavailable() is None:
            found = _native.cost(problem)
            return Flops(full, triangle, found.pairs, found.touched), found.scratch_bytes, found.tasks
        return Flops(full, triangle, full if self.mask is None else _seen(self.mask, spec), full), 0, 1


def _seen(mask: Mask, spec: Spec) -> int:
    """The pairs that a mask leaves, from its dense form."""
    if spec.Lq * spec.Lk > COUNTED:
        raise NotImplementedError(
            f"mask: expected at most {COUNTED} pairs of queries and keys where the compiled core is missing, "
            f"which counts masks, got {spec.Lq} x {spec.Lk}"
        )
    return int(mask.to_dense(spec.Lq, spec.Lk).expand(spec.B, spec.Hq, -1, -1).sum())


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
