"""Run a problem: plainly, with its derivatives, or as an operator.

The torch and reference backends are built from differentiable operations. The native kernels are not. They
get their derivatives here, from three maps: the backward pass J^T dy, forward mode J t, and the gradient of
<J t, dy>, which is the derivative of either (`_backends/torch/higher.py`). That gives every second derivative
but forward mode of forward mode. A missing derivative raises; nothing is ever detached in silence.
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
from .._call.spec import Problem
from .._tools.watching import PLAIN, below_autograd, in_transform, is_legacy_batchedtensor, is_watched
from . import ops as _ops, vmap as _vmap
from .ops import FIELDS, INPUTS, KEPT, FlatCall

Maybe = Tensor | None
NONE = (None,) * FIELDS
TENSORS, OFFSETS, SEED = (FlatCall._fields.index(name) for name in ("tensors", "offsets", "seed"))


def run(problem: Problem, name: str) -> tuple[Tensor, Tensor | None]:
    """out (..., Hq, Lq, Dv), and the LSE (..., Hq, Lq) or None."""
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
    """y = (out, LSE or None) of a canonical Problem: the short way, which most training takes.

    Arguments: the six inputs, and the Problem. `Transformed` does the same where PyTorch watches the call.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Maybe]:
        *inputs, p = args
        out, lse, stats, residual = _native.forward_saving(p)
        ctx.set_materialize_grads(False)
        kept = (*inputs, p.offset, out, stats, residual, *p.tensors)
        ctx.save_for_backward(*kept)
        ctx.spec, ctx.seed, ctx.strides = p.spec, p.seed, _all_strides(kept)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe) -> tuple[Maybe, ...]:
        wanted, kept = ctx.needs_input_grad[:INPUTS], ctx.saved_tensors
        q, k, v, bias, by_head, sink, offset, out, stats, residual, *tensors = kept
        p = Problem(ctx.spec, q, k, v, None, tuple(tensors), offset, bias, by_head, sink, ctx.seed, True)
        moved = _all_strides(kept) != ctx.strides  # by a hook
        if dout is None or moved or _wants_graph() or is_watched(q, k, v):
            return *_backward(_ops.arguments(p), (out, stats, residual), dout, dlse, wanted), None
        _check_mapped(dout, dlse)
        return *_native.backward(p, out, stats, residual, dout, dlse, wanted), None


def _all_strides(tensors: Sequence[Maybe]) -> list[tuple[int, ...] | None]:
    return [None if x is None else x.stride() for x in tensors]


# What Function.apply comes down to outside of transforms; its own tests take as long as a small forward pass.
_attend: Any = super(Function, RegardAttention).apply


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None:
    out, _, *more = output
    ctx.mark_non_differentiable(*(x for x in more if x is not None))
    ctx.set_materialize_grads(False)
    _save(ctx, inputs, out, *more)


class Transformed(Function):
    """y = (out, LSE) of a FlatCall, and what backward needs: stats and residual.

    In the form that `torch.func`, forward mode and operators need, which takes PyTorch longer to call.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        args = (*args[: FIELDS - 1], True)
        if not is_watched(*args[:3]):
            return _ops.forward(*args)
        *results, residual = _below(_ops.attention_forward, args)
        return *results, residual if args[0].dtype.itemsize == 2 else None

    setup_context = staticmethod(_remember)

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe, *_: Maybe) -> tuple[Maybe, ...]:
        call, kept = _saved(ctx)
        return *_backward(call, kept, dout, dlse, ctx.needs_input_grad[:INPUTS]), *NONE[INPUTS:]

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, _ = _saved(ctx)
        return *_apply(ForwardMode, *call, *tangents[:INPUTS]), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_forward(Transformed.apply, info.batch_size, dims, args)


class AttentionBackward(Function):
    """J^T dy: the gradients of the first six of a FlatCall. Arguments as of `attention_backward`."""

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        *_, dout, dlse, wanted = args
        _check_mapped(dout, dlse)
        if is_watched(*args[:3]):
            return _only(wanted, _below(_ops.attention_backward, args))
        return tuple(_ops.backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None:
        ctx.set_materialize_grads(False)
        *_, ctx.wanted = inputs
        _save(ctx, inputs, *inputs[FIELDS:-1])

    @staticmethod
    def backward(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, (*_, dout, dlse) = _saved(ctx)
        grads = _double_backward(call, dout, dlse, tangents)
        return *grads[:INPUTS], *NONE[INPUTS:], *NONE[:KEPT], *grads[INPUTS:], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, (*kept, dout, dlse) = _saved(ctx)
        ddout, ddlse = tangents[FIELDS + KEPT : FIELDS + KEPT + 2]
        by_inputs = _double_backward(call, dout, dlse, tangents[:INPUTS])[:INPUTS]
        by_dy = _backward(call, kept, ddout, ddlse, ctx.wanted)
        return tuple(
            _sum(x, y) if wanted else None for x, y, wanted in zip(by_inputs, by_dy, ctx.wanted, strict=True)
        )

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_backward(AttentionBackward.apply, info.batch_size, dims, args)


class ForwardMode(Function):
    """J t: the tangents of out and LSE. Arguments: a FlatCall, six tangents."""

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        _check_mapped(*args[FIELDS:])
        if type(args[0]) in PLAIN:  # then PyTorch sees the operations of `_higher` one by one
            return _ops.jvp(*args)
        return _below(_ops.attention_jvp, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None:
        ctx.set_materialize_grads(False)
        _save(ctx, inputs, *inputs[FIELDS:])

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe) -> tuple[Maybe, ...]:
        call, tangents = _saved(ctx)
        by_inputs = _double_backward(call, dout, dlse, tangents)[:INPUTS]
        out, _, *more = _apply(Transformed, *call)
        by_tangents = _backward(call, (out, *more), dout, dlse, tuple(t is not None for t in tangents))
        return *by_inputs, *NONE[INPUTS:], *by_tangents

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> NoReturn:
        _refuse("forward mode of forward mode")

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_one_by_one(ForwardMode.apply, info.batch_size, dims, args)


class DoubleBackward(Function):
    """The gradient of <J t, dy> by the first six of a FlatCall and by dy.

    Arguments: a FlatCall, dy, six tangents.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        if type(args[0]) in PLAIN:
            return _ops.double_backward(*args)
        given = [x is not None for x in (*args[:INPUTS], *args[FIELDS : FIELDS + 2])]
        return _only(given, _below(_ops.attention_double_backward, args))

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
    call: FlatCall, kept: Sequence[Any], dout: Maybe, dlse: Maybe, wanted: tuple[bool, ...]
) -> tuple[Maybe, ...]:
    """`AttentionBackward`, without a graph of its own where nothing asks for one."""
    if dout is None and dlse is None:
        return NONE[:INPUTS]
    dout = kept[0].new_zeros(()).expand(kept[0].shape) if dout is None else dout
    args = (*call, *kept, dout, dlse, wanted)
    return _apply(AttentionBackward, *args) if _wants_graph() else AttentionBackward.forward(*args)


def _wants_graph() -> bool:
    return torch.is_grad_enabled() or in_transform() or forward_ad._current_level >= 0


def _double_backward(
    call: FlatCall, dout: Maybe, dlse: Maybe, tangents: Sequence[Maybe]
) -> tuple[Maybe, ...]:
    """`DoubleBackward`, unless all tangents or both of dy are zero."""
    if (dout is None and dlse is None) or all(t is None for t in tangents):
        return NONE[: INPUTS + 2]
    if dout is None:
        dout = call.q.new_zeros(()).expand(*call.q.shape[:3], call.v.shape[3])
    return _apply(DoubleBackward, *call, dout, dlse, *tangents)


def _apply(function: type[Function], *args: Any) -> tuple[Any, ...]:
    return function.apply(*args)  # type: ignore[no-any-return]


def _sum(x: Maybe, y: Maybe) -> Maybe:
    return y if x is None else x if y is None else x + y


def _below(op: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The operator without its derivatives, which the Function that calls it has."""
    if is_dynamo_compiling():  # a backward pass on its own, which has no Function around it
        return op(*args)  # type: ignore[no-any-return]
    with below_autograd():
        return op(*args)  # type: ignore[no-any-return]


def _only(wanted: Sequence[bool], results: tuple[Tensor, ...]) -> tuple[Maybe, ...]:
    return tuple(x if w else None for x, w in zip(results, wanted, strict=True))


def _check_mapped(*tensors: Maybe) -> None:
    if is_dynamo_compiling():
        return
    if any(x is not None and is_legacy_batchedtensor(x) for x in tensors):
        raise NotImplementedError(
            "is_grads_batched=True and vectorize=True map by an older vmap that does not know attention; "
            "use torch.func.jacrev, torch.func.jacfwd or torch.func.vmap"
        )


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} of attention is not in the native backend, which has first and second derivatives; "
        "use impl='reference', where every derivative exists, at n x n memory"
    )


def _save(ctx: Any, call: Sequence[Any], *more: Maybe) -> None:
    """Everything that is a tensor by PyTorch's own means: hooks see it, changes in place are noticed."""
    tensors = (*call[:INPUTS], call[OFFSETS], call[SEED], *more, *call[TENSORS])
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)
    ctx.numbers, ctx.more = call[SEED + 1 : FIELDS], len(more)


def _saved(ctx: Any) -> tuple[FlatCall, tuple[Any, ...]]:
    tensors, end = ctx.saved_tensors, INPUTS + 2 + ctx.more
    offsets, seed = tensors[INPUTS : INPUTS + 2]
    call = (*tensors[:INPUTS], tensors[end:], offsets, seed, *ctx.numbers)
    return FlatCall(*call), tensors[INPUTS + 2 : end]


def _register(op: Any, function: type[Function]) -> None:
    def with_derivatives(*args: Any) -> tuple[Tensor, ...]:
        if in_transform():  # PyTorch has begun to peel the levels off, too late for a Function to follow
            raise NotImplementedError(
                f"{op}: torch.func cannot differentiate an operator, as it must inside torch.compile; call "
                "regard.attention under torch.func outside, or use backward() and torch.autograd.grad"
            )
        if any_needs_grad(*args):
            return _ops.filled(*_apply(function, *args))
        return _below(op, args)

    _ops.library.impl(op, with_derivatives, "Autograd")


_register(_ops.attention_forward, Transformed)
_register(_ops.attention_backward, AttentionBackward)
_register(_ops.attention_jvp, ForwardMode)
_register(_ops.attention_double_backward, DoubleBackward)
