"""Runs additive attention, and defines its operators in `torch.ops.regard`.

The operators keep memory linear: backward computes the scores again, tile by tile. Transforms of
`torch.func`, forward mode and second derivatives use differentiable operations instead, for which
autograd saves the intermediate results of all tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils.flop_counter import register_flop_formula

from .._backends.torch import additive
from .._call.additive import AdditiveCall
from .._tools.watching import in_transform
from .attention import check_mapped
from .ops import library, none_to_empty
from .vmap import map_one_by_one

INPUTS = 4  # q, k, v and score: the first fields of an AdditiveCall
FIELDS = len(AdditiveCall._fields)
CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor score, Tensor bad_q, Tensor bad_k, Tensor[] tensors, "
    "Tensor? seed, SymInt[] code, float dropout, bool weights"
)


def run(call: AdditiveCall) -> tuple[Tensor, Tensor | None]:
    """Returns the output (B, 1, Lq, Dv), and the weights (B, 1, Lq, Lk) or None."""
    transformed = in_transform() or forward_ad._current_level >= 0
    if transformed and not is_dynamo_compiling():
        return additive.forward(call)
    out, weights = torch.ops.regard.additive_forward(*call)
    return out, weights if call.weights else None


def _forward(*args: Any) -> tuple[Tensor, ...]:
    return none_to_empty(*additive.forward(AdditiveCall(*args)))


def _backward(*args: Any) -> tuple[Tensor, ...]:
    return additive.backward(AdditiveCall(*args[:FIELDS]), *args[FIELDS:])


def _forward_shapes(*args: Any) -> tuple[Tensor, ...]:
    call = AdditiveCall(*args)
    B, Lq, Lk, _ = call.sizes
    weights = call.q.new_empty((B, 1, Lq, Lk)) if call.weights else None
    return none_to_empty(call.q.new_empty((B, 1, Lq, call.v.shape[3])), weights)


def _backward_shapes(*args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[:INPUTS])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = AdditiveCall(*inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call[:6], call.seed, *call.tensors)
    ctx.constants = call[8:]


def _gradients(ctx: Any, dout: Tensor | None, dweights: Tensor | None) -> tuple[Any, ...]:
    check_mapped(dout, dweights)
    q, k, v, score, bad_q, bad_k, seed, *tensors = ctx.saved_tensors
    call = AdditiveCall(q, k, v, score, bad_q, bad_k, tensors, seed, *ctx.constants)
    dweights = dweights if call.weights else None
    if dout is None:
        dout = v.new_zeros(()).expand(*q.shape[:3], v.shape[3])
    if torch.is_grad_enabled() and not is_dynamo_compiling():
        grads = _differentiable_gradients(call, ctx.needs_input_grad[:INPUTS], dout, dweights)
    else:
        grads = torch.ops.regard.additive_backward(*call, dout, dweights)
    code: list[None] | None = None if call.code else []  # PyTorch takes an empty list for a list of tensors
    return *grads, None, None, [None] * len(tensors), None, code, None, None


def _differentiable_gradients(
    call: AdditiveCall, wanted: tuple[bool, ...], dout: Tensor, dweights: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Computes gradients with differentiable operations, for second derivatives."""
    out, weights = additive.forward(call)
    tensors = call.q, call.k, call.v, call.score
    inputs = [x for x, w in zip(tensors, wanted, strict=True) if w]
    outputs, dys = [out], [dout]
    if weights is not None and dweights is not None:
        outputs, dys = [out, weights], [dout, dweights]
    grads = iter(torch.autograd.grad(outputs, inputs, dys, create_graph=True))
    return tuple(next(grads) if w else None for w in wanted)


def _define(schema: str, kernel: Any, shapes: Any) -> Any:
    """Registers an operator with its kernel, shape function and batching rule, and returns it."""
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"regard::{name}", shapes, lib=library)
    op = getattr(torch.ops.regard, name).default

    def batching(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return map_one_by_one(op, info.batch_size, dims, args)

    torch.library.register_vmap(op, batching, lib=library)
    return op


additive_forward = _define(
    f"additive_forward({CALL}) -> (Tensor out, Tensor weights)", _forward, _forward_shapes
)
additive_backward = _define(
    f"additive_backward({CALL}, Tensor dout, Tensor? dweights) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dscore)",
    _backward,
    _backward_shapes,
)
torch.library.register_autograd(additive_forward, _gradients, setup_context=_setup_context, lib=library)


# FLOPs of all pairs: the product with the score vector and the product with the values


@register_flop_formula(torch.ops.regard.additive_forward, get_raw=True)
def _forward_flops(*args: Any, out_val: Any = None) -> int:
    return _products(AdditiveCall(*args))


@register_flop_formula(torch.ops.regard.additive_backward, get_raw=True)
def _backward_flops(*args: Any, out_val: Any = None) -> int:
    """Returns the FLOPs of the recomputed scores and of the products for the gradients."""
    call = AdditiveCall(*args[:FIELDS])
    return 2 * _products(call)


def _products(call: AdditiveCall) -> int:
    B, Lq, Lk, hidden = call.sizes
    return 2 * B * Lq * Lk * (hidden + call.v.shape[3])
