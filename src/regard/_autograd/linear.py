"""Runs linear attention, and defines the gradients that its native backend needs for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._backends.dispatch import TABLE
from .._backends.native import linear as _native
from .._backends.native.linear import NOTHING_SAVED, LinearSaved
from .._backends.torch import linear as _linear_torch
from .._call.linear import LinearCall, LinearResult
from .._call.make import any_needs_grad
from .._call.spec import QKV

Maybe = Tensor | None
INPUTS = 7  # q, k, v, log_decay, beta, S, z: the first fields of a LinearCall


def run(call: LinearCall, name: str) -> LinearResult:
    """Runs a call of linear attention with backend `name`.

    Only the native backend needs an autograd Function: the others consist of differentiable
    operations.
    """
    if name == "native" and any_needs_grad(*call[:INPUTS]):
        return LinearResult(*_attend(*call[:INPUTS], call))
    result: LinearResult = TABLE["linear"][name].run(call)
    return result if call.k.shape[2] else _connected(result, call)


def _connected(result: LinearResult, call: LinearCall) -> LinearResult:
    """Makes the results of a call without keys depend on all inputs in the autograd graph.

    Otherwise some results would not require grad.
    """
    inputs: tuple[Maybe, ...] = call[:INPUTS]  # type: ignore[assignment]
    zero = sum((x[..., :0].sum() for x in inputs if x is not None), call.q.new_zeros(()))
    return LinearResult(result.out + zero, result.S + zero, None if result.z is None else result.z + zero)


def run_saving(p: LinearCall, name: str, for_backward: bool, out: Tensor) -> tuple[LinearResult, LinearSaved]:
    """Runs a call without recording it, and writes its output to `out`.

    Also returns the tensors that `gradients` needs.
    """
    if name == "native":
        return _native.linear_saving(p, out) if for_backward else (_native.linear(p, out), NOTHING_SAVED)
    result: LinearResult = TABLE["linear"][name].run(p)
    out.copy_(result.out)
    return result, NOTHING_SAVED


def gradients(
    p: LinearCall, name: str, saved: LinearSaved, dy: tuple[Tensor, Maybe, Maybe], into: QKV
) -> tuple[Maybe, ...]:
    """Writes the gradients of q, k and v to `into`. Returns those of log_decay, beta, S and z.

    `dy` are the gradients of out, S and z. Only the native backend has a backward pass: the others
    run the call again.
    """
    if name == "native":
        return _native.linear_backward(p, saved, *dy, into)[3:]
    with torch.enable_grad():
        tensors: tuple[Maybe, ...] = p[:INPUTS]  # type: ignore[assignment]
        inputs: list[Any] = [None if x is None else x.detach().requires_grad_() for x in tensors]
        result = run(LinearCall(*inputs, *p[INPUTS:]), name)
    pairs = [(y, dy) for y, dy in zip(result, dy, strict=True) if y is not None]
    needing = [x for x in inputs if x is not None]
    results, dys = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(results, needing, dys, materialize_grads=True))
    for x in into:
        x.copy_(next(grads))
    return tuple(None if x is None else next(grads) for x in inputs[3:])


class RegardLinearAttention(Function):
    """The autograd Function of the native backend: maps a LinearCall to (out, S, z or None).

    Arguments: the first seven fields of a LinearCall, then the LinearCall itself.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Maybe, ...]:
        *inputs, p = args
        result, linear_saved = _native.linear_saving(p)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, p.lengths, *linear_saved)
        ctx.constants = p[INPUTS + 1 :]
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dS: Maybe, dz: Maybe) -> tuple[Maybe, ...]:
        saved = ctx.saved_tensors  # read once: under checkpointing each access recomputes forward
        p = LinearCall(*saved[: INPUTS + 1], *ctx.constants)
        if dout is None:
            dout = p.q.new_zeros(()).expand(*p.q.shape[:3], p.v.shape[3])
        if torch.is_grad_enabled():
            return *_through_torch(p, ctx.needs_input_grad[:INPUTS], dout, dS, dz), None
        linear_saved = LinearSaved(*saved[INPUTS + 1 :])
        return *_native.linear_backward(p, linear_saved, dout, dS, dz), None


def _through_torch(
    p: LinearCall, wanted: tuple[bool, ...], dout: Tensor, dS: Maybe, dz: Maybe
) -> tuple[Maybe, ...]:
    """Computes gradients with the torch backend, so that they can be differentiated again."""
    pairs = zip(_linear_torch.linear(p), (dout, dS, dz), strict=True)
    used = [(y, dy) for y, dy in pairs if y is not None and dy is not None]
    inputs: list[Tensor] = [getattr(p, name) for name, w in zip(p._fields, wanted, strict=False) if w]
    outputs, dys = zip(*used, strict=True)
    grads = iter(torch.autograd.grad(outputs, inputs, dys, create_graph=True, allow_unused=True))
    return tuple(next(grads) if w else None for w in wanted)


# Function.apply without its checks for transforms: transformed calls run on the torch backend.
_attend: Any = super(Function, RegardLinearAttention).apply
