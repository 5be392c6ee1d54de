"""The memory layout of a call's tensors, and the canonical form of a call.

The canonical form has q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), a bias tensor that
broadcasts to (B, Hq, Lq, Lk), and a sink (Hq,) in the dtype of the LSE. Views bring every call into
this form, except for the tensors in `Spec.copied`, which are copied.
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
    options: Options,
) -> Spec:  # fmt: skip
    """Builds the Spec of a call whose arguments have been checked.

    `code` and `tensors` are the mask program, `bias` is the kind of bias.
    """
    q, k, v = qkv
    Hq, Hkv = (1, 1) if q.ndim == 2 else (q.shape[-3], k.shape[-3])
    Lq, Lk, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    B, offset = math.prod(batch), options.offset
    pair_bias = options.bias if isinstance(options.bias, Tensor) else None
    strides, copied = _strides(qkv, pair_bias, batch)
    return Spec(
        dtype=q.dtype, lse_dtype=compute_dtype(q.dtype), device=q.device, batch=batch, rank=q.ndim,
        B=B, Hq=Hq, Hkv=Hkv, Lq=Lq, Lk=Lk, D=D, Dv=Dv,
        q_stride=strides["q"], k_stride=strides["k"], v_stride=strides["v"], code=code,
        offset=Lk - Lq if offset is None else None if isinstance(offset, Tensor) else offset,
        bias=bias, bias_dtype=None if pair_bias is None else pair_bias.dtype,
        bias_stride=strides.get("bias", (0, 0, 0, 0)),
        scale=(1 / math.sqrt(D) if D else 1.0) if options.scale is None else options.scale,
        softcap=options.softcap, sink=options.sink is not None, dropout=options.dropout,
        return_lse=options.return_lse, copied=copied,
        out_shape=(*batch, Hq, Lq, Dv) if q.ndim > 2 else (Lq, Dv),
        out_stride=ordered_like(strides["q"], (B, Hq, Lq, Dv)),
        has_operands=bias != "none" or options.sink is not None
        or bool(len(tensors) or options.dropout or isinstance(offset, Tensor)),
        is_canonical=_is_canonical(qkv, pair_bias, options.sink),
    )  # fmt: skip


def _is_canonical(qkv: QKV, bias: Tensor | None, sink: Tensor | None) -> bool:
    q, k, v = qkv
    fits = q.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0] and (bias is None or bias.ndim == 4)
    return fits and (sink is None or (sink.dtype is compute_dtype(q.dtype) and sink.is_contiguous()))


# Strides


def _strides(
    qkv: QKV, bias: Tensor | None, batch: tuple[int, ...]
) -> tuple[dict[str, Strides], tuple[str, ...]]:
    """Returns the strides of q, k, v and bias as 4-D tensors, and the names of tensors to copy.

    A tensor must be copied if its batch dims cannot be flattened in place.
    """
    tensors = dict(zip("qkv", qkv, strict=True)) | ({} if bias is None else {"bias": bias})
    strides, copied = {}, []
    for name, x in tensors.items():
        outer = _merged_stride(x.shape[:-3], x.stride()[:-3], batch)
        H, L, D = (0, 0, 0, *x.stride())[-3:]
        if outer is None:
            copied.append(name)
            outer, H, L, D = _contiguous(x.shape[-3:])
        if name == "bias":
            H, L, D = (s if n != 1 else 0 for n, s in zip((1, 1, 1, *x.shape)[-3:], (H, L, D), strict=True))
        strides[name] = (outer, H, L, D)
    return strides, tuple(copied)


def _contiguous(sizes: tuple[int, ...]) -> Strides:
    """Returns the strides of a contiguous tensor (B, H, L, D). `sizes` are H, L and D."""
    H, L, D = sizes
    return H * L * D, L * D, D, 1


def _merged_stride(shape: tuple[int, ...], stride: tuple[int, ...], batch: tuple[int, ...]) -> int | None:
    """Returns the stride of all batch dims flattened into one, or None if no such stride exists."""
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
    """Returns dense strides for `shape` with the memory order of `stride`.

    Dims of size 1 or stride 0 have the same place in the order as in a contiguous tensor.
    """
    ordered = [d for d in range(4) if shape[d] > 1 and stride[d] > 0]
    order = list(range(4))
    for rank, dim in zip(ordered, descending(ordered, stride), strict=True):
        order[rank] = dim
    dense, step = [0] * 4, 1
    for dim in reversed(order):
        dense[dim], step = step, step * max(shape[dim], 1)
    return dense[0], dense[1], dense[2], dense[3]


def descending(dims: Sequence[int], stride: tuple[int, ...]) -> list[int]:
    """Returns the dims, sorted by descending stride.

    Insertion sort, because `sorted` does not take SymInts.
    """
    order: list[int] = []
    for dim in dims:
        order.insert(sum(1 for other in order if stride[other] >= stride[dim]), dim)
    return order


def copied(spec: Spec, name: str, x: Any) -> Any:
    """Returns x, or a contiguous copy with all batch dims if `name` is in `spec.copied`."""
    return x.expand(*spec.batch, *x.shape[-3:]).contiguous() if name in spec.copied else x


# The canonical form


def canonical(problem: Problem) -> Problem:
    """Converts a problem to canonical form by differentiable views.

    The field `mask` becomes None, because the Spec contains the mask program.
    """
    spec, p = problem.spec, problem
    if spec.is_canonical:
        return problem
    return Problem(
        _canonical_spec(spec), heads_4d(spec, p.q), heads_4d(spec, p.k), heads_4d(spec, p.v), None,
        p.tensors, p.offset, pairs_4d(spec, p.bias) if isinstance(p.bias, Tensor) else None, p.by_head,
        None if p.sink is None else p.sink.to(spec.lse_dtype).contiguous(), p.seed, p.needs_grad, p.watched,
        p.origin,
    )  # fmt: skip


def _canonical_spec(spec: Spec) -> Spec:
    """Returns the Spec of the canonical form.

    Strides stay the same, because a Spec's strides always have four dims.
    """
    canonical_spec: Spec | None = spec.memo.get("canonical")
    if canonical_spec is None:
        canonical_spec = spec.memo["canonical"] = replace(
            spec, batch=(spec.B,), rank=4, out_shape=(spec.B, spec.Hq, spec.Lq, spec.Dv), copied=(),
            is_canonical=True, memo={}, choices=({}, {}),
        )  # fmt: skip
    return canonical_spec


def heads_4d(spec: Spec, x: Tensor) -> Tensor:
    """Returns a view of q, k or v as (B, H, L, D)."""
    if spec.rank <= 3:
        return x[(None,) * (4 - spec.rank)]
    if spec.rank == 4:
        return x if x.shape[0] == spec.B else x.expand(spec.B, -1, -1, -1)
    return x.expand(*spec.batch, -1, -1, -1).reshape(spec.B, *x.shape[-3:])


def pairs_4d(spec: Spec, x: Tensor) -> Tensor:
    """Reshapes a dense mask or bias to (1 or B, 1 or Hq, 1 or Lq, 1 or Lk).

    x broadcasts to (*batch, Hq, Lq, Lk).
    """
    if x.ndim == spec.rank == 4:
        return x
    x = x[(None,) * max(0, 3 - x.ndim)]
    if math.prod(x.shape[:-3]) == 1:
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*spec.batch, *x.shape[-3:]).reshape(spec.B, *x.shape[-3:])


def dense_mask(problem: Problem) -> Tensor | None:
    """Returns the mask as bool (1 or B, 1 or Hq, Lq, Lk), True = may attend. None without mask."""
    spec = problem.spec
    if problem.mask is None:
        return None
    keep = problem.mask.to_dense(spec.Lq, spec.Lk, problem.batch_offset, spec.Hq, spec.device)
    return pairs_4d(spec, keep)


def dense_bias(problem: Problem, dtype: torch.dtype) -> Tensor | None:
    """Returns the bias in `dtype`, (1 or B, 1 or Hq, 1 or Lq, 1 or Lk). None without a bias.

    ALiBi and a relative bias are computed in `dtype`, too.
    """
    bias, spec = problem.bias, problem.spec
    if bias is None:
        return None
    if isinstance(bias, Alibi):
        bias = Alibi(bias.slopes.to(dtype))
    elif isinstance(bias, RelativeBias):
        bias = bias.in_dtype(dtype)
    dense = bias if isinstance(bias, Tensor) else bias.dense(spec.Lq, spec.Lk, problem.batch_offset)
    return pairs_4d(spec, dense.to(dtype))


def restore_out(spec: Spec, out: Tensor) -> Tensor:
    """Converts out (B, Hq, Lq, Dv) to q's dtype and memory order and the caller's leading dims."""
    order = descending(range(4), spec.out_stride)
    inverse = [order.index(d) for d in range(4)]
    return out.to(spec.dtype).permute(order).contiguous().permute(inverse).reshape(spec.out_shape)
