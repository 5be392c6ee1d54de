"""The operators in `torch.ops.regard`: how compilers, exporters and modes see the native kernels.

Each has a schema, a CPU kernel and a shape function, the two passes also a count of FLOPs. `vmap.py` gives
them batching rules, `attention.py` derivatives. A `FlatCall` is what crosses a schema: tensors in canonical
form and numbers, no Python object. A schema cannot say that a result is missing: where a kernel returns None,
its operator returns an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._backends.native import attention as _native
from .._backends.torch import higher as _higher
from .._call.layout import canonical, ordered_like, spec_of
from .._call.make import specs
from .._call.memory import remember
from .._call.spec import Options, Problem, Spec, compute_dtype
from .._tools.arguments import broadcasts
from .._tools.watching import PLAIN

Maybe = Tensor | None
Results = tuple[Maybe, ...]


class FlatCall(NamedTuple):
    """A call in canonical form, in the order of the schemas. The first six may have gradients."""

    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor  # (B, Hkv, Lk, Dv)
    bias: Maybe  # (1 or B, 1 or Hq, 1 or Lq, 1 or Lk)
    by_head: Maybe  # (Hq,) ALiBi's slopes, (Hq, 2 * far + 1) the relative bias by distance
    sink: Maybe  # (Hq,)
    tensors: Sequence[Tensor]  # the mask program's, (1 or B, ...)
    offsets: Maybe  # (B,) int64
    seed: Maybe  # () int64, with dropout
    code: Sequence[int]  # the mask program
    offset: int  # where there are no offsets
    scale: float
    softcap: float | None
    dropout: float
    saving: bool  # forward returns what backward needs, which takes longer where there are few rows

    @property
    def inputs(self) -> Results:
        return self.q, self.k, self.v, self.bias, self.by_head, self.sink


INPUTS = 6
KEPT = 3  # out, stats and residual: what backward needs of forward
FIELDS = len(FlatCall._fields)


class BackwardArguments(NamedTuple):
    """The further arguments of the backward pass."""

    out: Tensor  # (B, Hq, Lq, Dv)
    stats: Tensor  # (2, B, Hq, Lq)
    residual: Maybe  # like out, for 16-bit dtypes
    dout: Tensor  # (B, Hq, Lq, Dv)
    dlse: Maybe  # (B, Hq, Lq)
    wanted: Sequence[bool]  # for each of the six inputs


def backward_arguments(args: Sequence[Any]) -> tuple[FlatCall, BackwardArguments]:
    return FlatCall(*args[:FIELDS]), BackwardArguments(*args[FIELDS:])


# The kernels


def forward(*args: Any) -> Results:
    """A FlatCall -> out, LSE, stats, residual."""
    call = FlatCall(*args)
    problem = problem_of(call)
    return _native.forward_saving(problem) if call.saving else (*_native.forward(problem), None, None)


def backward(*args: Any) -> Results:
    """A FlatCall, BackwardArguments -> the gradients that are wanted."""
    call, (out, stats, residual, dout, dlse, wanted) = backward_arguments(args)
    problem = problem_of(call)
    out, residual = _laid_out(out, problem.spec), _laid_out(residual, problem.spec)
    return _native.backward(problem, out, stats.contiguous(), residual, dout, dlse, tuple(wanted))  # type: ignore[arg-type]


def _laid_out(out: Any, spec: Spec) -> Any:
    """As forward has left it: a hook or a transform may have moved it."""
    if out is None or out.stride() == spec.out_stride:
        return out
    return out.new_empty_strided(out.shape, spec.out_stride).copy_(out)


def jvp(*args: Any) -> Results:
    """A FlatCall, six tangents -> the tangents of out and LSE."""
    return _contiguous(_higher.jvp(problem_of(FlatCall(*args[:FIELDS])), args[FIELDS:]))


def double_backward(*args: Any) -> Results:
    """A FlatCall, dout, dlse, six tangents -> the gradients by the six inputs, dout and dlse."""
    dout, dlse, *tangents = args[FIELDS:]
    return _contiguous(_higher.double_backward(problem_of(FlatCall(*args[:FIELDS])), dout, dlse, tangents))


def _contiguous(results: Results) -> Results:
    return tuple(None if x is None else x.contiguous() for x in results)


def arguments(problem: Problem) -> FlatCall:
    """The arguments of an operator, from a problem of any layout."""
    p, spec = canonical(problem), problem.spec
    seed = None
    if spec.dropout:
        seed = torch.tensor(p.seed) if isinstance(p.seed, int) else p.seed
    return FlatCall(
        p.q, p.k, p.v, p.bias_tensor, p.by_head, p.sink, p.tensors, p.offset, seed,
        spec.code, 0 if spec.offset is None else spec.offset, spec.scale, spec.softcap, spec.dropout,
        p.needs_grad,
    )  # fmt: skip


def problem_of(call: FlatCall) -> Problem:
    """The canonical Problem of an operator's arguments. There is nothing left to check."""
    q, k, v, bias, by_head, sink, tensors, offsets, seed, code, offset, *numbers, _ = call
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype),
        None if by_head is None else by_head.ndim, sink is None, not tensors, tuple(code),
        None if offsets is not None else offset, *numbers,
    )  # fmt: skip
    spec = specs.get(key) or remember(specs, key, _spec(call))
    number = int(seed) if seed is not None else 0
    return Problem(spec, q, k, v, None, tuple(tensors), offsets, bias, by_head, sink, number, False)


def _spec(call: FlatCall) -> Spec:
    q, k, v, bias, by_head, sink, tensors, offsets, _, code, offset, scale, softcap, dropout, _ = call
    kind = "none" if bias is None else "tensor"
    if by_head is not None:
        kind = "alibi" if by_head.ndim == 1 else "relative"
    given = Options(
        None, offset if offsets is None else offsets, bias, scale, softcap, sink, dropout, return_lse=True
    )
    return spec_of((q, k, v), (q.shape[0],), tuple(code), tensors, kind, given)


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
    """Gradients of k and v lie in memory as k and v do."""
    call, more = backward_arguments(args)
    q, *kv, bias, by_head, sink = (x if w else None for x, w in zip(call.inputs, more.wanted, strict=True))
    dk, dv = (None if x is None else torch.empty_like(x) for x in kv)
    dq, *others = (None if x is None else x.new_empty(x.shape) for x in (q, bias, by_head, sink))
    return dq, dk, dv, *others


def _double_backward_shapes(*args: Any) -> Results:
    given = (*args[:INPUTS], *args[FIELDS : FIELDS + 2])
    return tuple(None if x is None else x.new_empty(x.shape) for x in given)


# The operators

CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? by_head, Tensor? sink, Tensor[] tensors, "
    "Tensor? offsets, Tensor? seed, SymInt[] code, SymInt offset, "
    "float scale, float? softcap, float dropout, bool saving"
)
SAVED = "Tensor out, Tensor stats, Tensor? residual"
DY = "Tensor dout, Tensor? dlse"
NAMES = FlatCall._fields[:INPUTS]
TANGENTS = ", ".join(f"Tensor? t{name}" for name in NAMES)
GRADIENTS = ", ".join(f"Tensor d{name}" for name in NAMES)

library = torch.library.Library("regard", "DEF")


def _define(schema: str, kernel: Callable[..., Results], shapes: Callable[..., Results]) -> Any:
    def cpu(*args: Any) -> tuple[Tensor, ...]:
        _check(FlatCall(*args[:FIELDS]))
        return filled(*kernel(*args))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        return filled(*shapes(*args))

    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"regard::{name}", fake, lib=library)
    return getattr(torch.ops.regard, name).default


def filled(*results: Maybe) -> tuple[Tensor, ...]:
    """Empty tensors in the place of None."""
    return tuple(torch.empty(0) if x is None else x for x in results)


def _check(call: FlatCall) -> None:
    """Anybody can call an operator, and the kernels trust what they are given."""
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
    f"attention_backward({CALL}, {SAVED}, {DY}, bool[] wanted) -> ({GRADIENTS})",
    backward,
    _backward_shapes,
)
attention_jvp = _define(f"attention_jvp({CALL}, {TANGENTS}) -> (Tensor tout, Tensor tlse)", jvp, _jvp_shapes)
attention_double_backward = _define(
    f"attention_double_backward({CALL}, {DY}, {TANGENTS}) -> ({GRADIENTS}, Tensor ddout, Tensor ddlse)",
    double_backward,
    _double_backward_shapes,
)


# FLOPs of the pairs that the mask leaves, as `plan` counts them


@register_flop_formula(torch.ops.regard.attention_forward, get_raw=True)
def _forward_flops(*args: Any, out_val: Any = None) -> int:
    call = FlatCall(*args)
    return 2 * _pairs(call) * (call.q.shape[3] + call.v.shape[3])


@register_flop_formula(torch.ops.regard.attention_backward, get_raw=True)
def _backward_flops(*args: Any, out_val: Any = None) -> int:
    """The scores again, then the products that the wanted gradients need; five in all."""
    call, more = backward_arguments(args)
    D, Dv = call.q.shape[3], call.v.shape[3]
    q, k, v, *others = more.wanted
    of_scores = q or k or any(others)
    return 2 * _pairs(call) * (D * (1 + q + k) + Dv * (v + of_scores))


def _pairs(call: FlatCall) -> int:
    """Visible pairs; all pairs where the mask cannot be read."""
    (B, Hq, Lq, _), Lk = call.q.shape, call.k.shape[2]
    known = all(type(x) in PLAIN for x in (*call.tensors, call.offsets) if x is not None)
    if not known or not all(type(n) is int for n in (B, Hq, Lq, Lk, call.offset)):
        return B * Hq * Lq * Lk
    return _native.cost(problem_of(call)).pairs
