"""Run a problem: plainly, with its derivatives, or as an operator.

The torch and reference backends are built from differentiable operations. The native kernels are not; here
they get derivatives from three maps that are linear in what they are given: the backward pass J^T dy, forward
mode J t, and the derivative of <J t, dy>, which is that of either (`_higher.py`). So there are all second
derivatives. Third ones raise; nothing is ever detached in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as in_transform
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function, forward_ad

from . import _native, _ops, _vmap
from ._dense import heads_4d, pairs_4d
from ._dispatch import BACKENDS
from ._ops import FIELDS, INPUTS, KEPT, Call
from ._problem import PLAIN, Problem, is_watched

Maybe = Tensor | None
NONE = (None,) * FIELDS


def run(problem: Problem, name: str) -> tuple[Tensor, Tensor | None]:
    """out (..., Hq, Lq, Dv), and the LSE (..., Hq, Lq) or None."""
    if name != "native":
        return BACKENDS[name].forward(problem)
    if not problem.needs_grad and not problem.watched:
        return _native.forward(problem)
    spec, call = problem.spec, canonical(problem)
    apply = _ops.attention_forward if problem.watched and not in_transform() else Attention.apply
    out, lse, *_ = apply(*call)
    if spec.rank != 4:
        out, lse = out.reshape(spec.out_shape), lse.reshape(spec.lse_shape)
    return out, lse if spec.return_lse else None


def canonical(problem: Problem) -> Call:
    """The problem in four dims, by differentiable views."""
    spec, p = problem.spec, problem
    seed = torch.tensor(p.seed) if isinstance(p.seed, int) else p.seed
    return Call(
        heads_4d(spec, p.q), heads_4d(spec, p.k), heads_4d(spec, p.v),
        pairs_4d(spec, p.bias) if isinstance(p.bias, Tensor) else None,
        p.by_head, p.sink.to(spec.lse_dtype).contiguous() if p.sink is not None else None,
        p.tensors, p.offset, seed if spec.dropout else None,
        spec.code, 0 if spec.offset is None else spec.offset, spec.scale, spec.softcap, spec.dropout,
    )  # fmt: skip


class Attention(Function):
    """y = (out, LSE), and the stats and rest of a Call."""

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        if is_watched(*args[:3]):
            return _below(_ops.attention_forward, args)
        return _ops.forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        out, _, *more = output
        ctx.mark_non_differentiable(*(x for x in more if x is not None))
        ctx.set_materialize_grads(False)
        _save(ctx, Call(*inputs), out, *more)

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe, *_: Maybe) -> tuple[Maybe, ...]:  # type: ignore[override]
        call, kept = _saved(ctx)
        grads = _backward(call, kept, dout, dlse, ctx.needs_input_grad[:INPUTS])
        return *grads, *NONE[INPUTS:]

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, kept = _saved(ctx)
        return *Tangent.apply(*call, *kept, *tangents[:INPUTS]), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_forward(Attention.apply, info.batch_size, dims, args)


class Backward(Function):
    """J^T dy: the gradients of the first six of a Call. Arguments as of `attention_backward`."""

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        if is_watched(*args[:3]):
            return _only(args[-1], _below(_ops.attention_backward, args))
        return tuple(_ops.backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Maybe, ...]) -> None:
        call, more = _ops.backward_arguments(inputs)
        ctx.set_materialize_grads(False)
        ctx.wanted = more.wanted
        _save(ctx, call, *more[:KEPT], more.dout, more.dlse)

    @staticmethod
    def backward(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, (*_, dout, dlse) = _saved(ctx)
        grads = _twice(call, dout, dlse, tangents)
        return *grads[:INPUTS], *NONE[INPUTS:], *NONE[:KEPT], *grads[INPUTS:], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        call, (*kept, dout, dlse) = _saved(ctx)
        ddout, ddlse = tangents[FIELDS + KEPT : FIELDS + KEPT + 2]
        by_inputs = _twice(call, dout, dlse, tangents[:INPUTS])[:INPUTS]
        by_dy = _backward(call, kept, ddout, ddlse, ctx.wanted)
        return tuple(
            _sum(x, y) if wanted else None for x, y, wanted in zip(by_inputs, by_dy, ctx.wanted, strict=True)
        )

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_backward(Backward.apply, info.batch_size, dims, args)


class Tangent(Function):
    """J t: the tangents of out and LSE. Arguments: a Call, what was kept, six tangents."""

    @staticmethod
    def forward(*args: Any) -> tuple[Maybe, ...]:
        _check_mapped(*args[FIELDS + KEPT :])
        args = args[:FIELDS] + args[FIELDS + KEPT :]
        if type(args[0]) in PLAIN:  # then PyTorch sees the operations of `_higher` one by one
            return _ops.jvp(*args)
        return _below(_ops.attention_jvp, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        _save(ctx, Call(*inputs[:FIELDS]), *inputs[FIELDS:])

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe) -> tuple[Maybe, ...]:  # type: ignore[override]
        call, more = _saved(ctx)
        kept, tangents = more[:KEPT], more[KEPT:]
        wanted = tuple(t is not None for t in tangents)
        by_inputs = _twice(call, dout, dlse, tangents)[:INPUTS]
        by_tangents = _backward(call, kept, dout, dlse, wanted)
        return *by_inputs, *NONE[INPUTS:], *NONE[:KEPT], *by_tangents

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> NoReturn:
        _refuse("forward mode of forward mode")

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_one_by_one(Tangent.apply, info.batch_size, dims, args)


class Twice(Function):
    """The gradient of <J t, dy> by the first six of a Call and by dy. Arguments: a Call, dy, six tangents."""

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

    @staticmethod
    def jvp(ctx: Any, *tangents: Maybe) -> NoReturn:
        _refuse("a third derivative")

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return _vmap.map_one_by_one(Twice.apply, info.batch_size, dims, args)


def _backward(
    call: Call, kept: Sequence[Any], dout: Maybe, dlse: Maybe, wanted: tuple[bool, ...]
) -> tuple[Maybe, ...]:
    """`Backward`, without a graph of its own where nothing asks for one."""
    if dout is None and dlse is None:
        return NONE[:INPUTS]
    dout = kept[0].new_zeros(()).expand(kept[0].shape) if dout is None else dout
    args = (*call, *kept, dout, dlse, wanted)
    if torch.is_grad_enabled() or in_transform() or forward_ad._current_level >= 0:
        return Backward.apply(*args)  # type: ignore[no-any-return]
    _check_mapped(dout, dlse)
    return Backward.forward(*args)


def _twice(call: Call, dout: Maybe, dlse: Maybe, tangents: Sequence[Maybe]) -> tuple[Maybe, ...]:
    """`Twice`, unless all tangents or both of dy are zero."""
    if (dout is None and dlse is None) or all(t is None for t in tangents):
        return NONE[: INPUTS + 2]
    if dout is None:
        dout = call.q.new_zeros(()).expand(*call.q.shape[:3], call.v.shape[3])
    return Twice.apply(*call, dout, dlse, *tangents)  # type: ignore[no-any-return]


def _sum(x: Maybe, y: Maybe) -> Maybe:
    return y if x is None else x if y is None else x + y


def _below(op: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The operator without its derivatives, which the Function that calls it has."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)  # type: ignore[no-any-return]


def _only(wanted: Sequence[bool], results: tuple[Tensor, ...]) -> tuple[Maybe, ...]:
    return tuple(x if w else None for x, w in zip(results, wanted, strict=True))


def _check_mapped(*tensors: Maybe) -> None:
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


def _save(ctx: Any, call: Call, *more: Maybe) -> None:
    tensors = (*call[:INPUTS], call.offsets, call.seed, *more, *call.tensors)
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)
    ctx.rest = call._replace(**dict.fromkeys(Call._fields[:INPUTS]), tensors=(), offsets=None, seed=None)
    ctx.more = len(more)


def _saved(ctx: Any) -> tuple[Call, tuple[Any, ...]]:
    tensors, more = ctx.saved_tensors, INPUTS + 2 + ctx.more
    q, k, v, bias, by_head, sink, offsets, seed = tensors[: INPUTS + 2]
    call = ctx.rest._replace(
        q=q,
        k=k,
        v=v,
        bias=bias,
        by_head=by_head,
        sink=sink,
        offsets=offsets,
        seed=seed,
        tensors=tensors[more:],
    )
    return call, tensors[INPUTS + 2 : more]


def _register(op: Any, apply: Callable[..., tuple[Maybe, ...]]) -> None:
    def with_derivatives(*args: Any) -> tuple[Tensor, ...]:
        return tuple(args[0].new_empty(0) if x is None else x for x in apply(*args))

    _ops.library.impl(op, with_derivatives, "Autograd")


def _tangent(*args: Any) -> tuple[Maybe, ...]:
    """`Tangent` needs more than forward mode alone does: its backward pass starts from what was kept."""
    out, _, *more = Attention.apply(*args[:FIELDS])
    return Tangent.apply(*args[:FIELDS], out, *more, *args[FIELDS:])  # type: ignore[no-any-return]


_register(_ops.attention_forward, Attention.apply)
_register(_ops.attention_backward, Backward.apply)
_register(_ops.attention_jvp, _tangent)
_register(_ops.attention_double_backward, Twice.apply)
