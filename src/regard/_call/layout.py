"""How the tensors of a call lie in memory, and their canonical form in four dims.

Canonical are q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), a bias of pairs that broadcasts to
(B, Hq, Lq, Lk), and a sink (Hq,) in the dtype of the LSE. Any call gets this form by views, apart from
tensors in `Spec.copied`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..scores import Alibi, RelativeBias
from .spec import QKV, Options, Problem, Spec, Strides, compute_dtype

# The Spec


def spec_of(
    qkv: QKV, batch: tuple[int, ...], code: tuple[int, ...], tensors: Sequence[Tensor], bias: str,
    given: Options,
) -> Spec:  # fmt: skip
    """Builds the Spec of a call whose arguments fit together.

    `code` and `tensors` are the mask's program, `bias` is the kind of bias.
    """
    q, k, v = qkv
    Hq, Hkv = (1, 1) if q.ndim == 2 else (q.shape[-3], k.shape[-3])
    Lq, Lk, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    B, offset = math.prod(batch), given.offset
    by_pair = given.bias if isinstance(given.bias, Tensor) else None
    strides, copied = _strides(qkv, by_pair, batch)
    return Spec(
        dtype=q.dtype, lse_dtype=compute_dtype(q.dtype), device=q.device, batch=batch, rank=q.ndim,
        B=B, Hq=Hq, Hkv=Hkv, Lq=Lq, Lk=Lk, D=D, Dv=Dv,
        q_stride=strides["q"], k_stride=strides["k"], v_stride=strides["v"], code=code,
        offset=Lk - Lq if offset is None else None if isinstance(offset, Tensor) else offset,
        bias=bias, bias_dtype=None if by_pair is None else by_pair.dtype,
        bias_stride=strides.get("bias", (0, 0, 0, 0)),
        scale=(1 / math.sqrt(D) if D else 1.0) if given.scale is None else given.scale,
        softcap=given.softcap, sink=given.sink is not None, dropout=given.dropout,
        return_lse=given.return_lse, copied=copied,
        out_shape=(*batch, Hq, Lq, Dv) if q.ndim > 2 else (Lq, Dv),
        out_stride=ordered_like(strides["q"], (B, Hq, Lq, Dv)),
        is_plain=bias == "none" and given.sink is None
        and not (len(tensors) or given.dropout or isinstance(offset, Tensor)),
        is_canonical=_is_canonical(qkv, by_pair, given.sink),
    )  # fmt: skip


def _is_canonical(qkv: QKV, bias: Tensor | None, sink: Tensor | None) -> bool:
    q, k, v = qkv
    fits = q.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0] and (bias is None or bias.ndim == 4)
    return fits and (sink is None or (sink.dtype is compute_dtype(q.dtype) and sink.is_contiguous()))


# Strides


def _strides(
    qkv: QKV, bias: Tensor | None, batch: tuple[int, ...]
) -> tuple[dict[str, Strides], tuple[str, ...]]:
    """Strides for (B, H, L, D), and the names of the tensors that must be copied to have them."""
    given = dict(zip("qkv", qkv, strict=True)) | ({} if bias is None else {"bias": bias})
    strides, copied = {}, []
    for name, x in given.items():
        outer = _merged_stride(x.shape[:-3], x.stride()[:-3], batch)
        H, L, D = (0, 0, 0, *x.stride())[-3:]
        if outer is None:
            copied.append(name)
            outer, H, L, D = _contiguous(x.shape[-3:])
        if name == "bias":
            H, L, D = (s if n != 1 else 0 for n, s in zip((1, 1, 1, *x.shape)[-3:], (H, L, D), strict=True))
        strides[name] = (outer, H, L, D)
    return strides, tuple(copied)


def _contiguous(own: tuple[int, ...]) -> Strides:
    """Strides of a contiguous (B, *own)."""
    H, L, D = own
    return H * L * D, L * D, D, 1


def _merged_stride(shape: tuple[int, ...], stride: tuple[int, ...], batch: tuple[int, ...]) -> int | None:
    """The stride of all batch dims taken as one, or None when no single stride does it."""
    if 0 in batch:
        return 0
    missing = len(batch) - len(shape)
    shape, stride = (1,) * missing + tuple(shape), (0,) * missing + tuple(stride)
    dims = [(b, 0 if n == 1 else s) for b, n, s in zip(batch, shape, stride, strict=True) if b != 1]
    for (_, outer), (size, inner) in pairwise(dims):
        if outer != size * inner:
            return None
    return dims[-1][1] if dims else 0


def ordered_like(stride: tuple[int, ...], shape: tuple[int, ...]) -> Strides:
    """Dense strides of `shape`, its dims in the memory order of `stride`; broadcast dims keep their place."""
    real = [d for d in range(4) if shape[d] > 1 and stride[d] > 0]
    order = list(range(4))
    for place, dim in zip(real, descending(real, stride), strict=True):
        order[place] = dim
    dense, step = [0] * 4, 1
    for dim in reversed(order):
        dense[dim], step = step, step * max(shape[dim], 1)
    return dense[0], dense[1], dense[2], dense[3]


def descending(dims: Sequence[int], stride: tuple[int, ...]) -> list[int]:
    """The dims by falling stride; compared one by one, because symbols cannot be sorted."""
    order: list[int] = []
    for dim in dims:
        order.insert(sum(1 for other in order if stride[other] >= stride[dim]), dim)
    return order


def copied(spec: Spec, name: str, x: Any) -> Any:
    """The tensor, contiguous over all samples if the Spec asks for a copy."""
    return x.expand(*spec.batch, *x.shape[-3:]).contiguous() if name in spec.copied else x


# The canonical form


def canonical(problem: Problem) -> Problem:
    """The problem in canonical form, by differentiable views. Its mask is the program in the Spec."""
    spec, p = problem.spec, problem
    if spec.is_canonical:
        return problem
    return Problem(
        _canonical_spec(spec), heads_4d(spec, p.q), heads_4d(spec, p.k), heads_4d(spec, p.v), None,
        p.tensors, p.offset, pairs_4d(spec, p.bias) if isinstance(p.bias, Tensor) else None, p.by_head,
        None if p.sink is None else p.sink.to(spec.lse_dtype).contiguous(), p.seed, p.needs_grad, p.watched,
    )  # fmt: skip


def _canonical_spec(spec: Spec) -> Spec:
    """Strides are the same: those of a Spec always are for four dims."""
    found: Spec | None = spec.memo.get("canonical")
    if found is None:
        found = spec.memo["canonical"] = replace(
            spec, batch=(spec.B,), rank=4, out_shape=(spec.B, spec.Hq, spec.Lq, spec.Dv), copied=(),
            is_canonical=True, memo={}, choices=({}, {}),
        )  # fmt: skip
    return found


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
