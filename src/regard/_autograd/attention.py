"""Runs a problem: without derivatives, with derivatives, or as an operator.

The torch and reference backends consist of differentiable operations. The native kernels get their
derivatives here. J is the derivative of y = (out, LSE) with respect to the inputs, t a tangent of
the inputs, and dy the gradient of the loss with respect to y. Three maps suffice: the backward pass
J^T dy, forward mode J t, and the gradient of <J t, dy>, from which the derivatives of the first two
follow (`_backends/torch/higher.py`). Every second derivative exists except forward mode of forward
mode. A missing derivative raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_dynamo_compiling

from .._backends.dispatch import TABLE
from .._backends.native import attention as _native
from .._call.layout import canonical
from .._call.make import any_needs_grad
from .._call.spec import Problem, fast_new
from .._tools.watching import PLAIN, below_autograd, in_transform, is_legacy_batchedtensor, is_watched
from . import ops as _ops, vmap as _vmap
from .ops import FIELDS, INPUTS, N_SAVED, FlatCall

Maybe = Tensor | None
NONE = (None,) * FIELDS
TENSORS, OFFSETS, SEED = (FlatCall._fields.index(name) for name in ("tensors", "offsets", "seed"))


def run(problem: Problem, name: str) -> tuple[Tensor, Tensor | None]:
    """Computes out (..., Hq, Lq, Dv), and the LSE (..., Hq, Lq) or None, with backend `name`."""
    if name != "native":
        results: tuple[Tensor, Tensor | None] = TABLE["attention"][name].run(problem)
        return results
    if not problem.needs_grad and not problem.watched:
        return _native.forward(problem)
    if not problem.watched and forward_ad._current_level < 0:
        p = canonical(problem)
        out, lse = _attend(p.q, p.k, p.v, p.bias_tensor, p.by_head, p.sink, p)
    else:
        call = _ops.arguments(problem)
        transformed = not problem.watched or (in_transform() and not is_dynamo_compiling())
        out, lse, *_ = _apply(Transformed, *call) if transformed else _ops.attention_forward(*call)
    spec = problem.spec
    if spec.rank != 4:
        out, lse = out.reshape(spec.out_shape), None if lse is None else lse.reshape(spec.lse_shape)
    return out, lse if spec.return_lse else None


class RegardAttention(Function):
    """Maps a canonical Problem to (out, LSE or None): the fast path of training.

    Arguments: the six differentiable inputs (q, k, v, bias, by_head, sink) and the Problem. by_head
    holds ALiBi slopes or a relative bias. `Transformed` computes the same for watched calls and in
    forward mode.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Maybe]:
        *inputs, p = args
        out, lse, stats, residual = _native.forward_saving(p)
        ctx.set_materialize_grads(False)
        saved = (*inputs, p.offset, out, stats, residual, *p.tensors)
        ctx.save_for_backward(*saved)
        ctx.spec, ctx.seed, ctx.origin, ctx.strides = p.spec, p.seed, p.origin, _all_strides(saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe) -> tuple[Maybe, ...]:
        wanted, saved = ctx.needs_input_grad[:INPUTS], ctx.saved_tensors
        q, k, v, bias, by_head, sink, offset, out, stats, residual, *tensors = saved
        rest = (tuple(tensors), offset, bias, by_head, sink, ctx.seed, True, False, ctx.origin)
        p = fast_new(Problem, (ctx.spec, q, k, v, None, *rest))
        moved = _all_strides(saved) != ctx.strides  # a saved-tensor hook may change the layout
        if dout is None or moved or _wants_graph() or is_watched(q, k, v):
            return *_backward(_ops.arguments(p), (out, stats, residual), dout, dlse, wanted), None
        check_mapped(dout, dlse)
        return *_native.backward(p, out, stats, residual, dout, dlse, wanted), None


def _all_strides(tensors: Sequence[Maybe]) -> list[tuple[int, ...] | None]:
    return [None if x is None else x.stride() for x in tensors]


# Function.apply without its checks for transforms, which take as long as a small forward pass.
_attend: Any = super(Function, RegardAttention).apply


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None:
    out, _, *saved = output
    ctx.mark_non_differentiable(*(x for x in saved if x is not None))
    ctx.set_materialize_grads(False)
    _save(ctx, inputs, out, *saved)


class Transformed(Function):
    """Maps a FlatCall to (out, LSE, stats, residual). Stats and residual are saved for backward.

    `torch.func`, forward mode and operators need a Function with a separate `setup_context`. Such a
    Function is slower to call than `RegardAttention`.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        args = (*args[: FIELDS - 1], True)
        if not is_watched(*args[:3]):
            return _ops.forward(*args)
        *results, residual = _call_below_autograd(_ops.attention_forward, args)
        return *results, residual if args[0].dtype.itemsize == 2 else None

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe, *_: Maybe) -> tuple[Maybe, ...]:
        call, saved = _restore(ctx)
        return *_backward(call, saved, dout, dlse, ctx.needs_input_grad[:INPUTS]), *NONE[INPUTS:]

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, _ = _restore(ctx)
        return *_apply(ForwardMode, *call, *tangents[:INPUTS]), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_forward(Transformed.apply, info.batch_size, dims, args)


class AttentionBackward(Function):
    """Computes the gradients of the inputs from the gradients of out and LSE.

    The inputs are the first six fields of a FlatCall, which are differentiable. Arguments: those of
    the operator `attention_backward`.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        *_, dout, dlse, wanted = args
        check_mapped(dout, dlse)
        if is_watched(*args[:3]):
            return _only(wanted, _call_below_autograd(_ops.attention_backward, args))
        return tuple(_ops.backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None:
        ctx.set_materialize_grads(False)
        *_, ctx.wanted = inputs
        _save(ctx, inputs, *inputs[FIELDS:-1])

    @staticmethod
    def backward(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, (*_, dout, dlse) = _restore(ctx)
        grads = _double_backward(call, dout, dlse, tangents)
        return *grads[:INPUTS], *NONE[INPUTS:], *NONE[:N_SAVED], *grads[INPUTS:], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, (*saved, dout, dlse) = _restore(ctx)
        ddout, ddlse = tangents[FIELDS + N_SAVED : FIELDS + N_SAVED + 2]
        by_inputs = _double_backward(call, dout, dlse, tangents[:INPUTS])[:INPUTS]
        by_dy = _backward(call, saved, ddout, ddlse, ctx.wanted)
        return tuple(
            _sum(x, y) if wanted else None for x, y, wanted in zip(by_inputs, by_dy, ctx.wanted, strict=True)
        )

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_backward(AttentionBackward.apply, info.batch_size, dims, args)


class ForwardMode(Function):
    """Computes the tangents of out and LSE from the tangents of the inputs (a JVP).

    Arguments: a FlatCall and the tangents of its first six fields, which are differentiable.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        check_mapped(*args[FIELDS:])
        if type(args[0]) in PLAIN:  # `_higher` consists of differentiable operations: no operator needed
            return _ops.jvp(*args)
        return _call_below_autograd(_ops.attention_jvp, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None:
        ctx.set_materialize_grads(False)
        _save(ctx, inputs, *inputs[FIELDS:])

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe) -> tuple[Maybe, ...]:
        call, tangents = _restore(ctx)
        by_inputs = _double_backward(call, dout, dlse, tangents)[:INPUTS]
        out, _, *saved = _apply(Transformed, *call)
        by_tangents = _backward(call, (out, *saved), dout, dlse, tuple(t is not None for t in tangents))
        return *by_inputs, *NONE[INPUTS:], *by_tangents

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> NoReturn:
        _refuse("forward mode of forward mode")

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_one_by_one(ForwardMode.apply, info.batch_size, dims, args)


class DoubleBackward(Function):
    """Computes the gradients of <J t, dy> with respect to the inputs and to dy.

    The inputs are the first six fields of a FlatCall, t are their tangents, J t are the tangents of
    (out, LSE), and dy is (dout, dlse). Arguments: a FlatCall, dout, dlse and t.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        if type(args[0]) in PLAIN:
            return _ops.double_backward(*args)
        present = [x is not None for x in (*args[:INPUTS], *args[FIELDS : FIELDS + 2])]
        return _only(present, _call_below_autograd(_ops.attention_double_backward, args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> NoReturn:
        _refuse("a third derivative")

    jvp = backward

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_one_by_one(DoubleBackward.apply, info.batch_size, dims, args)


def _backward(
    call: FlatCall, saved: Sequence[Any], dout: Maybe, dlse: Maybe, wanted: tuple[bool, ...]
) -> tuple[Maybe, ...]:
    """Runs `AttentionBackward`. Records a graph only if its results may be differentiated."""
    if dout is None and dlse is None:
        return NONE[:INPUTS]
    dout = saved[0].new_zeros(()).expand(saved[0].shape) if dout is None else dout
    args = (*call, *saved, dout, dlse, wanted)
    return _apply(AttentionBackward, *args) if _wants_graph() else AttentionBackward.forward(*args)


def _wants_graph() -> bool:
    return torch.is_grad_enabled() or in_transform() or forward_ad._current_level >= 0


def _double_backward(
    call: FlatCall, dout: Maybe, dlse: Maybe, tangents: Sequence[Maybe]
) -> tuple[Maybe, ...]:
    """Runs `DoubleBackward`.

    All gradients are None if all tangents are None, or if both dout and dlse are None.
    """
    if (dout is None and dlse is None) or all(t is None for t in tangents):
        return NONE[: INPUTS + 2]
    if dout is None:
        dout = call.q.new_zeros(()).expand(*call.q.shape[:3], call.v.shape[3])
    return _apply(DoubleBackward, *call, dout, dlse, *tangents)


def _apply(function: type[Function], *args: Any) -> tuple[Any, ...]:
    return function.apply(*args)  # type: ignore[no-any-return]


def _sum(x: Maybe, y: Maybe) -> Maybe:
    return y if x is None else x if y is None else x + y


def _call_below_autograd(op: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Calls an operator below autograd, because the calling Function defines the derivatives."""
    if is_dynamo_compiling():  # in a compiled backward pass there is no calling Function
        return op(*args)  # type: ignore[no-any-return]
    with below_autograd():
        return op(*args)  # type: ignore[no-any-return]


def _only(wanted: Sequence[bool], results: tuple[Tensor, ...]) -> tuple[Maybe, ...]:
    """Returns the results with None in place of those that are not wanted."""
    return tuple(x if w else None for x, w in zip(results, wanted, strict=True))


def check_mapped(*tensors: Maybe) -> None:
    """Raises NotImplementedError if one of the tensors is batched by PyTorch's legacy vmap."""
    if is_dynamo_compiling():
        return
    for x in tensors:
        if x is not None and is_legacy_batchedtensor(x):
            raise NotImplementedError(
                "is_grads_batched=True and vectorize=True use an older vmap, which attention does not "
                "support; use torch.func.jacrev, torch.func.jacfwd or torch.func.vmap"
            )


def _refuse(derivative: str) -> NoReturn:
    raise NotImplementedError(
        f"{derivative} of attention is not implemented in the native backend, which has first and second "
        "derivatives; use impl='reference', which has every derivative, at n x n memory"
    )


def _save(ctx: Any, call: Sequence[Any], *results: Maybe) -> None:
    """Saves a FlatCall and some results in ctx.

    Tensors go through `save_for_backward`, so that hooks see them and in-place changes are
    detected.
    """
    tensors = (*call[:INPUTS], call[OFFSETS], call[SEED], *results, *call[TENSORS])
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)
    ctx.constants, ctx.n_results = call[SEED + 1 : FIELDS], len(results)


def _restore(ctx: Any) -> tuple[FlatCall, tuple[Any, ...]]:
    """Returns the FlatCall and the results that `_save` stored in ctx."""
    tensors, end = ctx.saved_tensors, INPUTS + 2 + ctx.n_results
    offsets, seed = tensors[INPUTS : INPUTS + 2]
    call = (*tensors[:INPUTS], tensors[end:], offsets, seed, *ctx.constants)
    return FlatCall(*call), tensors[INPUTS + 2 : end]


def _register(op: Any, function: type[Function]) -> None:
    """Registers `function` as the autograd Function of operator `op`."""

    def with_derivatives(*args: Any) -> tuple[Tensor, ...]:
        if in_transform():  # the tensors are already unwrapped: too late to apply a Function
            raise NotImplementedError(
                f"{op}: torch.func cannot differentiate an operator, as inside torch.compile; call "
                "regard.attention under torch.func outside, or use backward() or torch.autograd.grad"
            )
        if any_needs_grad(*args):
            return _ops.none_to_empty(*_apply(function, *args))
        return _call_below_autograd(op, args)

    _ops.library.impl(op, with_derivatives, "Autograd")


_register(_ops.attention_forward, Transformed)
_register(_ops.attention_backward, AttentionBackward)
_register(_ops.attention_jvp, ForwardMode)
_register(_ops.attention_double_backward, DoubleBackward)
