"""The public function `merge`: combines partial results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._call.check import fail
from .._call.spec import DTYPES, compute_dtype
from .._tools.arguments import describe

Partials = Tensor | Sequence[Tensor]


def merge(outs: Partials, lses: Partials) -> tuple[Tensor, Tensor]:
    """Merges partial results of attention over disjoint sets of keys into the result over all keys.

    With `out_i, lse_i = attention(q, k_i, v_i, return_lse=True)` the merged result is

        lse = log(sum_i exp(lse_i)),    out = sum_i exp(lse_i - lse) * out_i

    A fully masked row of a partial result (LSE -inf) contributes nothing. If a row is fully masked
    in all partial results, its output is zeros, its LSE is -inf and its gradients are zero. `merge`
    is differentiable with respect to outs and lses, in reverse and forward mode. The LSE of a call
    includes its `sink`: pass the sink to only one of the calls.

    Args:
        outs: N tensors (..., Hq, Lq, Dv) of one floating dtype, or one tensor (N, ..., Hq, Lq, Dv).
        lses: N tensors (..., Hq, Lq), or one tensor (N, ..., Hq, Lq), in float64 if outs are
            float64, else in float32.

    Returns:
        out (..., Hq, Lq, Dv) in the dtype of outs and the LSE (..., Hq, Lq), computed in the LSE's
        dtype.

    Example:
        >>> near = regard.attention(q, k[..., :9, :], v[..., :9, :], return_lse=True)
        >>> far = regard.attention(q, k[..., 9:, :], v[..., 9:, :], return_lse=True)
        >>> out, lse = regard.merge(*zip(near, far))
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    _check(outs, lses)
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    masses = (lses - top).exp()  # (N, ..., Hq, Lq)
    total = masses.sum(0)
    fully_masked = total == 0
    total = total.masked_fill(fully_masked, 1)  # before the logarithm, whose gradient at 0 is infinite
    lse = (top + total.log()).masked_fill(fully_masked, -torch.inf)
    # 0 * NaN is NaN, so rows without weight are set to 0 before the product.
    outs_seen = outs.to(lses.dtype).masked_fill((lses == -torch.inf).unsqueeze(-1), 0)
    out = ((masses / total).unsqueeze(-1) * outs_seen).sum(0)
    return out.to(outs.dtype), lse


def _stacked(name: str, partials: Partials) -> Tensor:
    """Returns N partial results as one tensor (N, ...)."""
    if isinstance(partials, Tensor):
        if partials.ndim == 0 or len(partials) == 0:
            raise ValueError(f"{name}: expected N >= 1 results in dim 0, got shape {tuple(partials.shape)}")
        return partials
    if not isinstance(partials, Sequence) or not partials or not all(isinstance(x, Tensor) for x in partials):
        raise TypeError(f"{name}: expected a tensor, or a list of at least one, got {describe(partials)}")
    kinds = {(tuple(x.shape), x.dtype) for x in partials}
    if len(kinds) > 1:
        raise ValueError(f"{name}: expected tensors of one shape and dtype, got {sorted(map(str, kinds))}")
    return torch.stack(tuple(partials))


def _check(outs: Tensor, lses: Tensor) -> None:
    if outs.dtype not in DTYPES:
        raise TypeError(f"outs: expected dtype float64, float32, bfloat16 or float16, got {outs.dtype}")
    expected = compute_dtype(outs.dtype)
    if lses.dtype is not expected:
        raise TypeError(f"lses: expected {expected} for outs in {outs.dtype}, got {lses.dtype}")
    if outs.ndim < 2 or lses.shape != outs.shape[:-1]:
        shape = f"the shape of outs without its last dim, {tuple(outs.shape[:-1])}"
        fail(ValueError, "lses", shape, tuple(lses.shape))
