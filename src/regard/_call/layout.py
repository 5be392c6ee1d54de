"""The problem as whole tensors, for the backends that work on those: four dims, dense masks and biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..scores import Alibi, RelativeBias
from .problem import Problem, Spec, descending


def heads_4d(spec: Spec, x: Tensor) -> Tensor:
    """q, k or v as (B, H, L, D)."""
    if spec.rank <= 3:
        return x[(None,) * (4 - spec.rank)]
    if spec.rank == 4:
        return x if x.shape[0] == spec.B else x.expand(spec.B, -1, -1, -1)
    return x.expand(*spec.batch, -1, -1, -1).reshape(spec.B, *x.shape[-3:])


def pairs_4d(spec: Spec, x: Tensor) -> Tensor:
    """A dense mask or bias, broadcastable to (*batch, Hq, Lq, Lk), as (1 or B, 1 or Hq, 1 or Lq, 1 or Lk)."""
    if x.ndim == spec.rank == 4:
        return x
    x = x[(None,) * max(0, 3 - x.ndim)]
    if math.prod(x.shape[:-3]) == 1:
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*spec.batch, *x.shape[-3:]).reshape(spec.B, *x.shape[-3:])


def dense_mask(problem: Problem) -> Tensor | None:
    """The mask as bool (1 or B, 1 or Hq, Lq, Lk), True = may attend."""
    spec = problem.spec
    if problem.mask is None:
        return None
    keep = problem.mask.to_dense(spec.Lq, spec.Lk, problem.batch_offset, spec.Hq, spec.device)
    return pairs_4d(spec, keep)


def dense_bias(problem: Problem, dtype: torch.dtype) -> Tensor | None:
    """The bias in `dtype`, (1 or B, 1 or Hq, 1 or Lq, 1 or Lk); ALiBi is multiplied out in that precision."""
    bias, spec = problem.bias, problem.spec
    if bias is None:
        return None
    if isinstance(bias, Alibi):
        bias = Alibi(bias.slopes.to(dtype))
    elif isinstance(bias, RelativeBias):
        bias = bias.in_dtype(dtype)
    dense = bias if isinstance(bias, Tensor) else bias.dense(spec.Lq, spec.Lk, problem.batch_offset)
    return pairs_4d(spec, dense.to(dtype))


def as_given(spec: Spec, out: Tensor) -> Tensor:
    """out (B, Hq, Lq, Dv) in q's dtype, memory order and rank."""
    order = descending(range(4), spec.out_stride)
    back = [order.index(d) for d in range(4)]
    return out.to(spec.dtype).permute(order).contiguous().permute(back).reshape(spec.out_shape)
