"""The cost of one call of `regard.attention`, computed from its shapes and its mask."""

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
    """FLOPs of the matrix products of attention, counted by four conventions.

    The conventions differ in which query-key pairs they count.
    """

    dense: int = 0  # all pairs
    causal: int = 0  # the pairs of a causal mask, diagonal included
    visible: int = 0  # the pairs that the mask allows
    executed: int = 0  # the pairs that the kernels compute; kernels process whole panels of query rows

    def __add__(self, other: Flops) -> Flops:
        return Flops(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def times(self, n: int) -> Flops:
        return Flops(*(n * value for value in astuple(self)))

    def plus(self, n: int) -> Flops:
        return Flops(*(n + value for value in astuple(self)))

    @property
    def halved(self) -> int:
        """Half of `dense`: the count that the FlashAttention papers report for causal attention."""
        return self.dense // 2


@dataclass(frozen=True)
class CallCost:
    """The cost of one call of `regard.attention`.

    Byte counts include each tensor once, even if the kernels read it several times.
    """

    pairs: Flops  # not FLOPs, but the numbers of query-key pairs by the same conventions
    forward: Flops
    backward: Flops  # five matrix products, because backward recomputes the scores
    read_bytes: int  # q, k, v, bias and the mask's tensors
    written_bytes: int  # the output
    saved_bytes: int  # all tensors saved for backward, including the inputs and the output
    scratch_bytes: int  # working memory of all threads in forward
    decodes: bool  # whether the decode kernel runs (few query rows; work is split along the keys)
    tasks: int  # number of tasks that the threads share


@dataclass(frozen=True)
class CallSpec:
    """A call's dtype, mask and shapes: q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv).

    Args:
        Hkv, Lk, Dv: as in the shapes above. Defaults: Hq, Lq and D.
        mask, dtype: as in `regard.attention`. The mask is aligned at the bottom right.
        bias: the shape of a float32 bias, such as (1, Hq, Lq, Lk).
        shared: if True, the values are a view of the first Dv channels of the keys, as in absorbed
            latent attention.
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
        inputs = _bytes(problem.q, problem.k, *(() if self.shared else (problem.v,)))
        inputs += _bytes(*problem.tensors) + 4 * math.prod(self.bias or (0,))
        out, stats = rows * spec.Dv * size, 2 * rows * spec.lse_dtype.itemsize
        residual = out if size == 2 else 0
        return CallCost(
            pairs=pairs, forward=pairs.times(2 * (spec.D + spec.Dv)),
            backward=pairs.times(2 * (3 * spec.D + 2 * spec.Dv)), read_bytes=inputs, written_bytes=out,
            saved_bytes=inputs + out + stats + residual, scratch_bytes=scratch,
            decodes=core.reason_unavailable() is None and _native.decodes(problem), tasks=tasks,
        )  # fmt: skip

    def _problem(self) -> Problem:
        """Returns the Problem of this call, with tensors on the meta device."""
        B, Hq, Lq, D = (count(name, getattr(self, name), 1) for name in ("B", "Hq", "Lq", "D"))
        optional = (("Hkv", self.Hkv, Hq), ("Lk", self.Lk, Lq), ("Dv", self.Dv, D))
        Hkv, Lk, Dv = (count(name, default if n is None else n, 1) for name, n, default in optional)
        q, k = _empty((B, Hq, Lq, D), self.dtype), _empty((B, Hkv, Lk, D), self.dtype)
        if self.shared and Dv > D:
            raise ValueError(f"Dv: expected at most D = {D} because shared=True, got {Dv}")
        v = k[..., :Dv] if self.shared else _empty((B, Hkv, Lk, Dv), self.dtype)
        bias = None if self.bias is None else _empty(self.bias, torch.float32)
        return make(q, k, v, Options(mask=self.mask, bias=bias))

    def _pairs(self, problem: Problem) -> tuple[Flops, int, int]:
        """Returns the numbers of query-key pairs, the scratch bytes and the number of tasks.

        The pairs are counted by each convention of `Flops`. Without the compiled core, all pairs
        count as executed.
        """
        spec = problem.spec
        heads, n = spec.B * spec.Hq, min(spec.Lq, spec.Lk)
        full = heads * spec.Lq * spec.Lk
        triangle = heads * (n * (spec.Lk - n) + n * (n + 1) // 2)
        if core.reason_unavailable() is None:
            cost = _native.cost(problem)
            return Flops(full, triangle, cost.pairs, cost.touched), cost.scratch_bytes, cost.tasks
        visible = full if self.mask is None else _count_visible(self.mask, spec)
        return Flops(full, triangle, visible, full), 0, 1


def _count_visible(mask: Mask, spec: Spec) -> int:
    """Returns the number of query-key pairs that the mask allows, counted in the dense mask."""
    if spec.Lq * spec.Lk > COUNTED:
        raise NotImplementedError(
            f"mask: expected at most {COUNTED} query-key pairs without the compiled core, "
            f"got {spec.Lq} x {spec.Lk}"
        )
    return int(mask.to_dense(spec.Lq, spec.Lk).expand(spec.B, spec.Hq, -1, -1).sum())


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
