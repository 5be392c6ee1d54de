"""The textbook formula in float64, and gradients, for the tests of `regard.compat`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import assert_close

Function = Callable[..., Tensor]


def textbook(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Computes attention of (..., H, L, D). Queries without a key have an output of zeros."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    if keep is None:
        return scores.softmax(-1) @ v
    keep = keep.expand_as(scores)
    weights = scores.masked_fill(~keep & keep.any(-1, keepdim=True), float("-inf")).softmax(-1)
    return (weights * keep) @ v


def check_against(function: Function, expected: Function, inputs: Sequence[Tensor], tolerance: float) -> None:
    """Compares results and gradients of a function in the dtype of its inputs with float64."""
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, want = function(*ours), expected(*theirs)
    assert out.dtype is inputs[0].dtype
    assert_close(out, want, rtol=tolerance, atol=tolerance)
    dout = torch.randn(want.shape)
    grads = torch.autograd.grad(out, ours, dout.to(out.dtype))
    for ours_grad, theirs_grad in zip(grads, torch.autograd.grad(want, theirs, dout.double()), strict=True):
        assert_close(ours_grad, theirs_grad, rtol=10 * tolerance, atol=10 * tolerance)
