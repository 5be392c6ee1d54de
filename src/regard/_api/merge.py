"""The exact union of partial results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._call.check import fail
from .._call.spec import DTYPES, compute_dtype
from .._tools.arguments import describe

Partials = Tensor | Sequence[Tensor]


def merge(outs: Partials, lses: Partials) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from results over some of them each.

    With partial results `out_i, lse_i = attention(q, k_i, v_i, return_lse=True)` over sets of keys that do
    not overlap, the softmax over their union is

        lse = log(sum_i exp(lse_i)),    out = sum_i exp(lse_i - lse) * out_i

    A partial result that saw nothing (LSE -inf) adds nothing, and where none saw anything the result is zeros
    with an LSE of -inf; gradients are zero there. Differentiable by outs and lses, in both modes.
    A `sink` is part of the LSE of the call that had it: give it to one of the calls, or it counts twice.

    Args:
        outs: N tensors (..., Hq, Lq, Dv) of one floating dtype, or one tensor with N in front.
        lses: N tensors (..., Hq, Lq), or one with N in front; float64 for float64, else float32.

    Returns:
        out (..., Hq, Lq, Dv) in the dtype of outs, computed in that of the LSE, and the LSE (..., Hq, Lq).

    Example:
        >>> near = regard.attention(q, k[..., :9, :], v[..., :9, :], return_lse=True)
        >>> far = regard.attention(q, k[..., 9:, :], v[..., 9:, :], return_lse=True)
        >>> out, lse = regard.merge(*zip(near, far))
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    _check(outs, lses)
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    parts = (lses - top).exp()  # (N, ..., Hq, Lq)
    total = parts.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1)  # before the logarithm, whose gradient at 0 is infinite
    lse = (top + total.log()).masked_fill(empty, -torch.inf)
    seen = outs.to(lses.dtype).masked_fill((lses == -torch.inf).unsqueeze(-1), 0)
    out = ((parts / total).unsqueeze(-1) * seen).sum(0)
    return out.to(outs.dtype), lse


def _stacked(name: str, given: Partials) -> Tensor:
    """(N, ...)"""
    if isinstance(given, Tensor):
        if given.ndim == 0 or len(given) == 0:
            raise ValueError(f"{name}: expected N >= 1 results in dim 0, got shape {tuple(given.shape)}")
        return given
    if not isinstance(given, Sequence) or not given or not all(isinstance(x, Tensor) for x in given):
        raise TypeError(f"{name}: expected a tensor, or a list of at least one, got {describe(given)}")
    kinds = {(tuple(x.shape), x.dtype) for x in given}
    if len(kinds) > 1:
        raise ValueError(f"{name}: expected tensors of one shape and dtype, got {sorted(map(str, kinds))}")
    return torch.stack(tuple(given))


def _check(outs: Tensor, lses: Tensor) -> None:
    if outs.dtype not in DTYPES:
        raise TypeError(f"outs: expected dtype float64, float32, bfloat16 or float16, got {outs.dtype}")
    expected = compute_dtype(outs.dtype)
    if lses.dtype is not expected:
        raise TypeError(f"lses: expected {expected} for outs in {outs.dtype}, got {lses.dtype}")
    if outs.ndim < 2 or lses.shape != outs.shape[:-1]:
        shape = f"the shape of outs without its last dim, {tuple(outs.shape[:-1])}"
        fail(ValueError, "lses", shape, tuple(lses.shape))
