"""The operators in `torch.ops.regard`, through which PyTorch sees the native kernels.

Each operator has a schema, a CPU kernel and a shape function; forward and backward also have a FLOP
formula. `vmap.py` registers their batching rules, `attention.py` their derivatives. The arguments
are a `FlatCall`: tensors in canonical form and numbers, no other Python objects. A schema has no
optional results, so an operator returns an empty tensor for a result that is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._backends.native import attention as _native
from .._backends.torch import higher as _higher
from .._call.dropout import WHOLE, DropoutOrigin
from .._call.layout import canonical, ordered_like, spec_of
from .._call.make import specs
from .._call.memory import remember
from .._call.spec import Options, Problem, Spec, compute_dtype
from .._tools.arguments import broadcasts
from .._tools.watching import PLAIN

Maybe = Tensor | None
Results = tuple[Maybe, ...]


class FlatCall(NamedTuple):
    """The arguments of an operator: a call in canonical form.

    The fields are in the order of the operator's schema. The first six are differentiable.
    """

    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor  # (B, Hkv, Lk, Dv)
    bias: Maybe  # (1 or B, 1 or Hq, 1 or Lq, 1 or Lk)
    by_head: Maybe  # ALiBi slopes (Hq,), or a relative bias (Hq, 2 * far + 1) at distances -far to far
    sink: Maybe  # (Hq,)
    tensors: Sequence[Tensor]  # the tensors of the mask program, (1 or B, ...)
    offsets: Maybe  # (B,) int64
    seed: Maybe  # () int64, with dropout
    code: Sequence[int]  # the mask program
    origin: Sequence[int]  # of dropout: the fields of DropoutOrigin, or nothing
    offset: int  # used if `offsets` is None
    scale: float
    softcap: float | None
    dropout: float
    saving: bool  # forward also returns stats and residual; slower with 9 to 16 queries

    @property
    def inputs(self) -> Results:
        return self.q, self.k, self.v, self.bias, self.by_head, self.sink


INPUTS = 6
N_SAVED = 3  # results of forward that backward needs: out, stats and residual
FIELDS = len(FlatCall._fields)


class BackwardArguments(NamedTuple):
    """The arguments of the backward operator that follow its FlatCall."""

    out: Tensor  # (B, Hq, Lq, Dv)
    stats: Tensor  # (2, B, Hq, Lq)
    residual: Maybe  # like out, for 16-bit dtypes
    dout: Tensor  # (B, Hq, Lq, Dv)
    dlse: Maybe  # (B, Hq, Lq)
    wanted: Sequence[bool]  # for each of the six inputs: whether to compute its gradient


def backward_arguments(args: Sequence[Any]) -> tuple[FlatCall, BackwardArguments]:
    """Splits the arguments of the backward operator into the FlatCall and the rest."""
    return FlatCall(*args[:FIELDS]), BackwardArguments(*args[FIELDS:])


# The kernels


def forward(*args: Any) -> Results:
    """Maps a FlatCall to out, LSE, stats and residual.

    Stats and residual are None unless the field `saving` of the FlatCall is True.
    """
    call = FlatCall(*args)
    problem = problem_of(call)
    return _native.forward_saving(problem) if call.saving else (*_native.forward(problem), None, None)


def backward(*args: Any) -> Results:
    """Maps a FlatCall and BackwardArguments to the gradients of the FlatCall's first six fields.

    Gradients that are not wanted are None.
    """
    call, (out, stats, residual, dout, dlse, wanted) = backward_arguments(args)
    problem = problem_of(call)
    out, residual = _restore_strides(out, problem.spec), _restore_strides(residual, problem.spec)
    return _native.backward(problem, out, stats.contiguous(), residual, dout, dlse, tuple(wanted))  # type: ignore[arg-type]


def _restore_strides(out: Any, spec: Spec) -> Any:
    """Returns out with the strides `spec.out_stride`. A hook or transform may have changed them."""
    if out is None or out.stride() == spec.out_stride:
        return out
    return out.new_empty_strided(out.shape, spec.out_stride).copy_(out)


def jvp(*args: Any) -> Results:
    """Maps a FlatCall and the tangents of its first six fields to the tangents of out and LSE."""
    return _contiguous(_higher.jvp(problem_of(FlatCall(*args[:FIELDS])), args[FIELDS:]))


def double_backward(*args: Any) -> Results:
    """Maps a FlatCall, dout, dlse and tangents t to the eight gradients of <J t, dy>.

    t are the tangents of the FlatCall's first six fields, J t the resulting tangents of out and
    LSE, and dy is (dout, dlse). The gradients are with respect to the six fields, dout and dlse.
    """
    dout, dlse, *tangents = args[FIELDS:]
    return _contiguous(_higher.double_backward(problem_of(FlatCall(*args[:FIELDS])), dout, dlse, tangents))


def _contiguous(results: Results) -> Results:
    return tuple(None if x is None else x.contiguous() for x in results)


def arguments(problem: Problem) -> FlatCall:
    """Converts a Problem of any layout to a FlatCall, the arguments of an operator."""
    p, spec = canonical(problem), problem.spec
    seed = None
    if spec.dropout:
        seed = torch.tensor(p.seed) if isinstance(p.seed, int) else p.seed
    return FlatCall(
        p.q, p.k, p.v, p.bias_tensor, p.by_head, p.sink, p.tensors, p.offset, seed,
        spec.code, () if p.origin == WHOLE else p.origin, 0 if spec.offset is None else spec.offset,
        spec.scale, spec.softcap, spec.dropout, p.needs_grad,
    )  # fmt: skip


def problem_of(call: FlatCall) -> Problem:
    """Converts a FlatCall to a canonical Problem, without checks."""
    q, k, v, bias, by_head, sink, tensors, offsets, seed, code, origin, offset, *numbers, _ = call
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype),
        None if by_head is None else by_head.ndim, sink is None, not tensors, tuple(code),
        None if offsets is not None else offset, *numbers,
    )  # fmt: skip
    spec = specs.get(key) or remember(specs, key, _spec(call))
    seed_bits = int(seed) if seed is not None else 0
    call_origin = DropoutOrigin(*origin) if origin else WHOLE
    return Problem(
        spec,
        q,
        k,
        v,
        None,
        tuple(tensors),
        offsets,
        bias,
        by_head,
        sink,
        seed_bits,
        False,
        False,
        call_origin,
    )


def _spec(call: FlatCall) -> Spec:
    q, k, v, bias, by_head, sink, tensors, offsets, _, code, _, offset, scale, softcap, dropout, _ = call
    kind = "none" if bias is None else "tensor"
    if by_head is not None:
        kind = "alibi" if by_head.ndim == 1 else "relative"
    options = Options(
        None, offset if offsets is None else offsets, bias, scale, softcap, sink, dropout, return_lse=True
    )
    return spec_of((q, k, v), (q.shape[0],), tuple(code), tensors, kind, options)


# Shapes


def _forward_shapes(*args: Any) -> Results:
    call, (out, lse) = FlatCall(*args), _jvp_shapes(*args)
    out = out.new_empty_strided(out.shape, ordered_like(call.q.stride(), out.shape))
    if not call.saving:
        return out, lse, None, None
    residual = torch.empty_like(out) if out.dtype.itemsize == 2 else None
    return out, lse, lse.new_empty((2, *lse.shape)), residual


def _jvp_shapes(*args: Any) -> tuple[Tensor, Tensor]:
    q, v = args[0], args[2]
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def _backward_shapes(*args: Any) -> Results:
    """Returns uninitialised tensors with the shapes of the wanted gradients.

    The gradients of k and v have the memory order of k and v.
    """
    call, rest = backward_arguments(args)
    q, *kv, bias, by_head, sink = (x if w else None for x, w in zip(call.inputs, rest.wanted, strict=True))
    dk, dv = (None if x is None else torch.empty_like(x) for x in kv)
    dq, *others = (None if x is None else x.new_empty(x.shape) for x in (q, bias, by_head, sink))
    return dq, dk, dv, *others


def _double_backward_shapes(*args: Any) -> Results:
    inputs = (*args[:INPUTS], *args[FIELDS : FIELDS + 2])
    return tuple(None if x is None else x.new_empty(x.shape) for x in inputs)


# The operators

CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? by_head, Tensor? sink, Tensor[] tensors, "
    "Tensor? offsets, Tensor? seed, SymInt[] code, SymInt[] origin, SymInt offset, "
    "float scale, float? softcap, float dropout, bool saving"
)
SAVED = "Tensor out, Tensor stats, Tensor? residual"
DY = "Tensor dout, Tensor? dlse"
NAMES = FlatCall._fields[:INPUTS]
TANGENTS = ", ".join(f"Tensor? t{name}" for name in NAMES)
GRADIENTS = ", ".join(f"Tensor d{name}" for name in NAMES)

library = torch.library.Library("regard", "DEF")


def _define(schema: str, kernel: Callable[..., Results], shapes: Callable[..., Results]) -> Any:
    """Registers an operator with its CPU kernel and shape function, and returns it."""

    def cpu(*args: Any) -> tuple[Tensor, ...]:
        _check(FlatCall(*args[:FIELDS]))
        return none_to_empty(*kernel(*args))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        return none_to_empty(*shapes(*args))

    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"regard::{name}", fake, lib=library)
    return getattr(torch.ops.regard, name).default


def none_to_empty(*results: Maybe) -> tuple[Tensor, ...]:
    """Replaces None by an empty tensor."""
    return tuple(torch.empty(0) if x is None else x for x in results)


def _check(call: FlatCall) -> None:
    """Checks that the tensors of a FlatCall fit together.

    The kernels do not check shapes, and users may call an operator directly.
    """
    q, k, v, bias, by_head, sink, tensors, offsets, *_ = call
    B, Hq, Lq, D = q.shape
    Hkv, Lk = v.shape[1:3]
    fits = k.shape == (B, Hkv, Lk, D) and v.shape[0] == B and (Hq == Hkv or (Hkv > 0 and Hq % Hkv == 0))
    fits = fits and q.dtype is k.dtype is v.dtype and all(x.shape[0] in (1, B) for x in tensors)
    fits = fits and (bias is None or (bias.ndim == 4 and broadcasts(bias.shape, (B, Hq, Lq, Lk))))
    fits = fits and all(x is None or x.shape[0] == Hq for x in (by_head, sink))
    if not fits or (offsets is not None and offsets.shape != (B,)):
        shapes = [tuple(x.shape) for x in (*call.inputs, offsets, *tensors) if x is not None]
        raise ValueError(
            f"torch.ops.regard: tensors do not fit together, shapes {shapes}; call regard.attention"
        )


attention_forward = _define(
    f"attention_forward({CALL}) -> (Tensor out, Tensor lse, Tensor stats, Tensor residual)",
    forward,
    _forward_shapes,
)
attention_backward = _define(
    f"attention_backward({CALL}, {SAVED}, {DY}, bool[] wanted) -> ({GRADIENTS})", backward, _backward_shapes
)
attention_jvp = _define(f"attention_jvp({CALL}, {TANGENTS}) -> (Tensor tout, Tensor tlse)", jvp, _jvp_shapes)
attention_double_backward = _define(
    f"attention_double_backward({CALL}, {DY}, {TANGENTS}) -> ({GRADIENTS}, Tensor ddout, Tensor ddlse)",
    double_backward,
    _double_backward_shapes,
)


# FLOPs of the visible pairs, counted as in `plan`


@register_flop_formula(torch.ops.regard.attention_forward, get_raw=True)
def _forward_flops(*args: Any, out_val: Any = None) -> int:
    call = FlatCall(*args)
    return 2 * _pairs(call) * (call.q.shape[3] + call.v.shape[3])


@register_flop_formula(torch.ops.regard.attention_backward, get_raw=True)
def _backward_flops(*args: Any, out_val: Any = None) -> int:
    """Returns the FLOPs of the recomputed scores and of the products for the wanted gradients.

    With all gradients there are five matrix products.
    """
    call, rest = backward_arguments(args)
    D, Dv = call.q.shape[3], call.v.shape[3]
    q, k, v, *others = rest.wanted
    needs_scores_grad = q or k or any(others)
    return 2 * _pairs(call) * (D * (1 + q + k) + Dv * (v + needs_scores_grad))


def _pairs(call: FlatCall) -> int:
    """Counts the (query, key) pairs that the mask allows.

    Counts all pairs if a size or a tensor of the mask has no known value yet.
    """
    (B, Hq, Lq, _), Lk = call.q.shape, call.k.shape[2]
    known = all(type(x) in PLAIN for x in (*call.tensors, call.offsets) if x is not None)
    if not known or not all(type(n) is int for n in (B, Hq, Lq, Lk, call.offset)):
        return B * Hq * Lq * Lk
    return _native.cost(problem_of(call)).pairs
