"""Builds the `Problem` of a call.

The `Spec` holds everything that is known without reading data. It is cached by the signature of the
call, so that a repeated call skips the checks. The `Problem` is a Spec and the live tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .._tools.arguments import readable
from .._tools.watching import PLAIN, in_autocast, is_watched
from ..masks import Mask, Program
from ..scores import Alibi, RelativeBias
from .check import as_mask, as_numbers, as_offset, as_seed, check, check_tensors, fail
from .dropout import WHOLE
from .layout import copied, spec_of
from .memory import Key, remember
from .spec import MAX_OFFSET, Bias, Options, Problem, Spec, fast_new, learned

NO_OPTIONS = Options()
specs: dict[Key, Spec] = {}


def make(q: Tensor, k: Tensor, v: Tensor, options: Options = NO_OPTIONS) -> Problem:
    """Checks a call and returns its Problem.

    The shapes are q (..., Hq, Lq, D), k (..., Hkv, Lk, D) and v (..., Hkv, Lk, Dv).
    """
    _, _, bias, scale, softcap, _, dropout, _, return_lse = options
    if (
        (scale is not None and type(scale) is not float)
        or (softcap is not None and type(softcap) is not float)
        or type(dropout) is not float
        or (return_lse is not False and return_lse is not True)
    ):
        return make(q, k, v, as_numbers(options))
    if in_autocast():
        q, k, v, bias = _autocast(q, k, v, bias)
        options = options._replace(bias=bias)
    if is_watched(q, k, v):
        return _make_general(None, q, k, v, options)
    try:
        key: Key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            scale, softcap, dropout, return_lse,
        )  # fmt: skip
        if not (q.is_cpu and k.is_cpu and v.is_cpu):
            key = (*key, q.device, k.device, v.device)
    except Exception:
        check_tensors((q, k, v))
        raise
    return _make_general(key, q, k, v, options)


def make_repeated(spec: Spec, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Problem:
    """Returns the Problem of a call that needs gradients and has been checked before.

    No tensor besides q, k and v takes part in the call.
    """
    return fast_new(Problem, (spec, q, k, v, mask, (), None, None, None, None, 0, True, False, WHOLE))


def _make_general(key: Key | None, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Problem:
    """Builds the Problem of a call whose numeric options are floats.

    `key` is None for a watched call. Then sizes may be symbolic, no Spec is cached, and no value of
    a tensor is read.
    """
    bias, sink = options.bias, options.sink
    if not is_compiling() and _any_negated(q, k, v, bias, sink):
        # Views like `z.conj().imag` have the negative bit: the kernels would read the wrong sign.
        q, k, v, *resolved = (_resolve_neg(x) for x in (q, k, v, *options))
        return make(q, k, v, Options(*resolved))
    mask, offset = as_mask(options.mask), as_offset(options.offset)
    if mask is not options.mask or offset is not options.offset:
        options = Options(mask, offset, *options[2:])
    program = mask.lower() if mask is not None else None
    spec = _spec(key, q, k, v, program, options)
    offsets = _flat_offset(spec, offset)
    if mask is not None and not is_compiling() and type(q) in PLAIN and not q.is_meta:
        mask.check_values(spec.batch, spec.Hq, spec.Lq, spec.Lk, spec.offset if offsets is None else offsets)
    tensors = program.bind(spec.batch) if program is not None else ()
    if tensors and not q.is_cpu and not q.is_meta:
        tensors = tuple(x.to(q.device) for x in tensors)
    if spec.copied:
        q, k, v, bias = (copied(spec, *x) for x in (("q", q), ("k", k), ("v", v), ("bias", bias)))
    bias_data = learned(bias)
    plain = (bias_data is None or type(bias_data) in PLAIN) and (sink is None or type(sink) in PLAIN)
    watched = key is None or not plain
    seed = as_seed(options.seed, spec.dropout, watched)
    grad = needs_grad(q, k, v) or any_needs_grad(bias_data, sink)
    by_head = _by_head(spec, bias)
    return Problem(spec, q, k, v, mask, tensors, offsets, bias, by_head, sink, seed, grad, watched)


def _any_negated(*values: object) -> bool:
    return any(isinstance(x, Tensor) and x.is_neg() for x in values)


def _resolve_neg(x: Any) -> Any:
    return x.resolve_neg() if isinstance(x, Tensor) else x


def _spec(
    key: Key | None, q: Tensor, k: Tensor, v: Tensor, program: Program | None, options: Options
) -> Spec:
    """Returns the Spec of a call from the cache, or checks the call and builds it.

    If `key` is None, the cache is not used.
    """
    offset, bias, sink = options.offset, options.bias, options.sink
    if key is not None and not (program is None and offset is None and bias is None and sink is None):
        key = (key, _program_key(program), _signature(offset), _bias_key(bias), _signature(sink))
    spec = specs.get(key) if key is not None else None
    if spec is None:
        code, tensors = (program.code, program.tensors) if program is not None else ((), ())
        batch = check((q, k, v), program, options)
        spec = spec_of((q, k, v), batch, code, tensors, _bias_kind(bias), options)
        if key is not None:
            remember(specs, key, spec)
    return spec


def _bias_kind(bias: Bias | None) -> str:
    if isinstance(bias, Tensor):
        return "tensor"
    return "alibi" if isinstance(bias, Alibi) else "relative" if isinstance(bias, RelativeBias) else "none"


def _by_head(spec: Spec, bias: Bias | None) -> Tensor | None:
    """Returns ALiBi slopes (Hq,), a relative bias (Hq, 2 * far + 1), or None.

    The relative bias has one column for each distance from -far to far, where far is max_distance.
    """
    if isinstance(bias, Alibi):
        return bias.slopes.to(spec.lse_dtype).contiguous()
    if isinstance(bias, RelativeBias):  # the bias is constant beyond max_distance
        return bias.in_dtype(spec.lse_dtype).by_distance(-bias.max_distance, bias.max_distance)
    return None


def _flat_offset(spec: Spec, offset: int | Tensor | None) -> Tensor | None:
    """Returns the offsets as (B,) int64, or None if all samples share Spec.offset."""
    if not isinstance(offset, Tensor):
        return None
    offset = offset.detach().reshape(spec.B).to(torch.int64)
    if readable(offset) and offset.is_cpu and spec.B:
        low, high = (int(x) for x in torch.aminmax(offset))
        if low < -MAX_OFFSET or high > MAX_OFFSET:
            fail(ValueError, "offset", "positions between -2**48 and 2**48", f"values from {low} to {high}")
    return offset


def _autocast(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias | None
) -> tuple[Tensor, Tensor, Tensor, Bias | None]:
    """Casts q, k, v and a bias tensor to the autocast dtype, as SDPA does.

    float64 tensors and learned parameters (sink, ALiBi, relative bias) keep their dtype.
    """
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(x: Any) -> Any:
        casts = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64
        return x.to(dtype) if casts else x

    return cast(q), cast(k), cast(v), cast(bias) if q.dtype is not torch.float64 else bias


# Signatures of the options


def _signature(x: int | Tensor | None) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return x if x is None or isinstance(x, int) else type(x)  # `check` rejects other types


def _bias_key(bias: Bias | None) -> Any:
    tensor = learned(bias)
    return None if bias is None else (type(bias), _signature(tensor))


def _program_key(program: Program | None) -> Any:
    if program is None or not program.tensors:
        return program and program.code
    return program.code, program.cores, tuple((t.shape, t.device) for t in program.tensors)


# Gradients


def needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether q, k or v requires grad in grad mode, or has a forward-mode tangent."""
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return True
    return forward_ad._current_level >= 0 and any(_has_tangent(x) for x in (q, k, v))


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def any_needs_grad(*values: object) -> bool:
    """Returns whether any tensor among the arguments needs a gradient or has a tangent."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    if is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    return forward_ad._current_level >= 0 and any(_has_tangent(x) for x in tensors)
