"""What is asked: every check of a call, once, and the frozen result.

A call is split in two. The `Spec` is everything that can be known without looking at data; it is cached by
the call's signature, so that a repeated call skips the checks. The `Problem` is a Spec and the live tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .._tools.arguments import as_int, broadcasts, describe, holds_integers, is_integer, number, readable
from .._tools.watching import PLAIN, in_autocast, is_watched
from ..masks import Dense, Mask, Program
from ..scores import Alibi, RelativeBias

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_SPECS = 4096
MAX_OFFSET = 2**48  # positions stay far from the 2^62 that means "unlimited" in a mask program

Bias = Tensor | Alibi | RelativeBias
Trio = tuple[Tensor, Tensor, Tensor]  # q, k, v
Strides = tuple[int, int, int, int]


@dataclass(frozen=True)
class Spec:
    """A checked call without its data. Strides are for (B, H, L, D), in elements, 0 in broadcast dims."""

    dtype: torch.dtype
    device: torch.device
    batch: tuple[int, ...]  # broadcast leading dims, () for (H, L, D) and (L, D)
    rank: int  # rank of q as given: 2 is the textbook form without heads
    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    q_stride: Strides
    k_stride: Strides
    v_stride: Strides
    code: tuple[int, ...]  # the mask program, () when there is no mask
    offset: int | None  # None: one for each sample, in Problem.offset
    bias: str  # "none" | "tensor" | "alibi" | "relative"
    bias_dtype: torch.dtype | None
    bias_stride: Strides  # for "tensor": (B, H, Lq, Lk), 0 where broadcast
    scale: float
    softcap: float | None
    sink: bool
    dropout: float
    return_lse: bool
    copied: tuple[str, ...]  # tensors whose batch dims cannot be flattened without a copy
    out_shape: tuple[int, ...]  # as the caller gets it
    out_stride: Strides  # (B, H, L, Dv), dense, ordered like q's
    is_plain: bool  # q, k, v and the Spec say it all: no other tensor and no seed
    is_direct: bool  # q, k and v are used as given: nothing copied, and rows of unit stride
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # of the backends
    # Dispatch's memo: impl -> backend, without and with gradients.
    choices: tuple[dict[str, str], dict[str, str]] = field(
        default_factory=lambda: ({}, {}), compare=False, repr=False
    )

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.out_shape[:-1]

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return (*self.out_shape[:-1], self.Lk)


class Problem(NamedTuple):
    """A Spec and the live tensors."""

    spec: Spec
    q: Tensor  # as given, or the one copy named in Spec.copied
    k: Tensor
    v: Tensor
    mask: Mask | None
    tensors: tuple[Tensor, ...]  # the mask program's, batch dims flattened to 1 or B
    offset: Tensor | None  # (B,) int64
    bias: Bias | None
    by_head: Tensor | None  # behind ALiBi (Hq,) or a relative bias (Hq, 2 * far + 1), in lse_dtype
    sink: Tensor | None
    seed: Any  # 64 bits, as a signed integer; in a call that is watched it may be a tensor ()
    needs_grad: bool  # grad mode is on and a floating input requires grad
    watched: bool = False  # the call must go through PyTorch's dispatcher: see `is_watched`

    @property
    def batch_offset(self) -> int | Tensor:
        """The offset as masks and biases take it: an int, or a tensor of shape `batch`."""
        if self.offset is None:
            assert self.spec.offset is not None
            return self.spec.offset
        return self.offset.view(self.spec.batch)


_specs: dict[tuple[Any, ...], Spec] = {}
_new = tuple.__new__


def make(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    offset: int | Tensor | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Problem:
    """Check a call and freeze it. q (..., Hq, Lq, D), k (..., Hkv, Lk, D), v (..., Hkv, Lk, Dv)."""
    if scale is not None and type(scale) is not float:
        scale = number("scale", scale)
    if softcap is not None and type(softcap) is not float:
        softcap = number("softcap", softcap)
    if type(dropout) is not float:
        dropout = number("dropout", dropout)
    if return_lse is not False and return_lse is not True:
        _fail(TypeError, "return_lse", "a bool", describe(return_lse))
    if in_autocast():
        q, k, v, bias = _autocast(q, k, v, bias)
    if is_watched(q, k, v):
        options = _Options(mask, offset, bias, scale, softcap, sink, dropout, seed, return_lse)
        return _make_general(None, q, k, v, options)
    try:
        key: tuple[Any, ...] = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            scale, softcap, dropout, return_lse,
        )  # fmt: skip
        if not (q.is_cpu and k.is_cpu and v.is_cpu):
            key = (*key, q.device, k.device, v.device)
    except Exception:
        _check_tensors((q, k, v))
        raise
    if bias is None and sink is None and seed is None and not dropout:
        spec = _specs.get(key) if mask is None and offset is None else _remembered(key, mask, offset)
        if spec is not None and spec.is_direct and not (q.is_neg() or k.is_neg() or v.is_neg()):
            # What Problem(...) does, in half the time.
            needs_grad = _needs_grad(q, k, v)
            return _new(Problem, (spec, q, k, v, mask, (), None, None, None, None, 0, needs_grad, False))
    options = _Options(mask, offset, bias, scale, softcap, sink, dropout, seed, return_lse)
    return _make_general(key, q, k, v, options)


def _remembered(key: tuple[Any, ...], mask: Mask | Tensor | None, offset: int | Tensor | None) -> Spec | None:
    """The Spec of a call that has been seen and has no tensor besides q, k and v."""
    if type(offset) is not int and offset is not None:
        return None
    if mask is None:
        return _specs.get((key, None, offset, None, None))
    program = mask.lower() if isinstance(mask, Mask) else None
    return _specs.get((key, program.code, offset, None, None)) if program and not program.tensors else None


class _Options(NamedTuple):
    """The keyword arguments of `make`, numbers already floats."""

    mask: Mask | Tensor | None
    offset: int | Tensor | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    dropout: float
    seed: int | Tensor | None
    return_lse: bool


def _make_general(key: tuple[Any, ...] | None, q: Tensor, k: Tensor, v: Tensor, given: _Options) -> Problem:
    """`make` with options, for unusual strides, or for a signature seen for the first time.

    Without a key the call is watched: sizes may be symbols, nothing is remembered and no value is read.
    """
    if not is_compiling() and _any_negated(q, k, v, given.bias, given.sink):
        return _without_negation(q, k, v, given)
    mask, offset = _as_mask(given.mask), _as_offset(given.offset)
    program = mask.lower() if mask is not None else None
    bias, sink = given.bias, given.sink
    spec = _find(key, q, k, v, mask, program, offset, given)
    offsets = _flat_offset(spec, offset)
    if mask is not None and not is_compiling() and type(q) in PLAIN and not q.is_meta:
        mask.check_values(spec.batch, spec.Hq, spec.Lq, spec.Lk, spec.offset if offsets is None else offsets)
    tensors = program.bind(spec.batch) if program is not None else ()
    if spec.copied:
        q, k, v = (_copy(spec, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        bias = _copy_bias(spec, bias)
    watched = key is None or not _all_plain(learned(bias), sink)
    seed = _as_seed(given.seed, spec.dropout, watched)
    needs_grad = _needs_grad(q, k, v) or any_needs_grad(learned(bias), sink)
    by_head = _by_head(spec, bias)
    return Problem(spec, q, k, v, mask, tensors, offsets, bias, by_head, sink, seed, needs_grad, watched)


def _find(
    key: tuple[Any, ...] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    program: Program | None,
    offset: int | Tensor | None,
    given: _Options,
) -> Spec:
    """The Spec of a call, from memory if there is a key."""
    if key is None:
        return _check(q, k, v, mask, program, offset, given)
    bias, sink = given.bias, given.sink
    if mask is not None or offset is not None or bias is not None or sink is not None:
        key = (key, _program_key(program), _signature(offset), _bias_key(bias), _signature(sink))
    spec = _specs.get(key)
    if spec is None:
        spec = _check(q, k, v, mask, program, offset, given)
        if len(_specs) >= MAX_SPECS:
            _specs.clear()
        _specs[key] = spec
    return spec


def _by_head(spec: Spec, bias: Bias | None) -> Tensor | None:
    if isinstance(bias, Alibi):
        return bias.slopes.to(spec.lse_dtype).contiguous()
    if isinstance(bias, RelativeBias):  # beyond max_distance the bias does not change
        return bias.in_dtype(spec.lse_dtype).by_distance(-bias.max_distance, bias.max_distance)
    return None


def _any_negated(*given: object) -> bool:
    return any(isinstance(x, Tensor) and x.is_neg() for x in given)


def _without_negation(q: Tensor, k: Tensor, v: Tensor, given: _Options) -> Problem:
    """Views like `z.conj().imag` hold the negated numbers in memory."""
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    options: dict[str, Any] = {
        name: x.resolve_neg() if isinstance(x, Tensor) else x for name, x in given._asdict().items()
    }
    return make(q, k, v, **options)


def _all_plain(*tensors: Tensor | None) -> bool:
    return all(x is None or type(x) in PLAIN for x in tensors)


def _autocast(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias | None
) -> tuple[Tensor, Tensor, Tensor, Bias | None]:
    """The tensors that SDPA would cast, cast: not float64, and not the parameters that may be float32."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(x: Any) -> Any:
        lower = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64
        return x.to(dtype) if lower else x

    return cast(q), cast(k), cast(v), cast(bias) if q.dtype is not torch.float64 else bias


# Arguments, one by one


def _fail(error: type[Exception], name: str, expected: str, got: object, qkv: Trio | None = None) -> NoReturn:
    shapes = ", ".join(f"{letter} {tuple(x.shape)}" for letter, x in zip("qkv", qkv or (), strict=False))
    raise error(f"{name}: expected {expected}, got {got}" + (f" ({shapes})" if shapes else ""))


def _as_mask(mask: Mask | Tensor | None) -> Mask | None:
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        _fail(TypeError, "mask", "a Mask or a bool tensor (True = may attend)", describe(mask))
    if mask.dtype is torch.bool:
        return Dense.borrow(mask if mask.ndim > 1 else mask.reshape(1, -1))
    how = (
        "numbers to add to the scores go to bias="
        if mask.dtype.is_floating_point
        else "convert it: mask.bool()"
    )
    _fail(TypeError, "mask", f"a Mask or a bool tensor, True = may attend ({how})", describe(mask))


def _as_offset(offset: int | Tensor | None) -> int | Tensor | None:
    if offset is None:
        return None
    if isinstance(offset, Tensor):
        if not holds_integers(offset):
            _fail(TypeError, "offset", "an int, or integers of shape (B,)", describe(offset))
        return offset
    if not is_integer(offset):
        _fail(TypeError, "offset", "an int, or integers of shape (B,)", describe(offset))
    offset = as_int(offset)
    if abs(offset) > MAX_OFFSET:
        _fail(ValueError, "offset", "a position between -2**48 and 2**48", offset)
    return offset


def _as_seed(seed: int | Tensor | None, dropout: float, watched: bool = False) -> int | Tensor:
    """The 64 bits that key the dropout pattern; without a seed, from PyTorch's default CPU generator.

    In a watched call the value of a tensor may not be known yet: it stays one.
    """
    if seed is None:
        if not dropout:
            return 0
        seed = torch.randint(2**63 - 1, (), device="cpu")
    if isinstance(seed, Tensor):
        if not holds_integers(seed) or seed.numel() != 1:
            _fail(TypeError, "seed", "an int, an integer tensor with one element, or None", describe(seed))
        return seed.reshape(()).to(torch.int64) if watched else int(seed)
    if not is_integer(seed):
        _fail(TypeError, "seed", "an int, an integer tensor with one element, or None", describe(seed))
    seed = as_int(seed)
    if not -(2**63) <= seed < 2**64:
        _fail(ValueError, "seed", "an integer of 64 bits", seed)
    return seed - 2**64 if seed >= 2**63 else seed


# Keys


def _signature(x: int | Tensor | None) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return x if x is None or isinstance(x, int) else type(x)  # another type fails its check


def _bias_key(bias: Bias | None) -> Any:
    if bias is None:
        return None
    if isinstance(bias, Alibi):
        return Alibi, _signature(bias.slopes)
    if isinstance(bias, RelativeBias):
        return RelativeBias, _signature(bias.table)
    return _signature(bias) if isinstance(bias, Tensor) else type(bias)


def _program_key(program: Program | None) -> Any:
    if program is None or not program.tensors:
        return program and program.code
    return program.code, program.cores, tuple((t.shape, t.device) for t in program.tensors)


# What depends on data


def _needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return True
    return forward_ad._current_level >= 0 and any(_has_tangent(x) for x in (q, k, v))


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def any_needs_grad(*given: object) -> bool:
    """`_needs_grad` of all tensors among the arguments."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    if is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    return forward_ad._current_level >= 0 and any(_has_tangent(x) for x in tensors)


def learned(bias: Bias | None) -> Tensor | None:
    """The tensor behind a bias: itself, ALiBi's slopes or the relative table."""
    return bias.slopes if isinstance(bias, Alibi) else bias.table if isinstance(bias, RelativeBias) else bias


def _flat_offset(spec: Spec, offset: int | Tensor | None) -> Tensor | None:
    """(B,) int64, or None when all samples share Spec.offset."""
    if not isinstance(offset, Tensor):
        return None
    offset = offset.detach().reshape(spec.B).to(torch.int64)
    if readable(offset) and offset.is_cpu and spec.B:
        low, high = (int(x) for x in torch.aminmax(offset))
        if low < -MAX_OFFSET or high > MAX_OFFSET:
            _fail(ValueError, "offset", "positions between -2**48 and 2**48", f"values from {low} to {high}")
    return offset


# Shapes


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    program: Program | None,
    offset: int | Tensor | None,
    given: _Options,
) -> Spec:
    """Everything that shapes, dtypes and options alone decide."""
    qkv = (q, k, v)
    _check_tensors(qkv)
    _check_scalars(given)
    batch = _check_sizes(qkv)
    Hq, Hkv = (1, 1) if q.ndim == 2 else (q.shape[-3], k.shape[-3])
    Lq, Lk, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    out_shape = (*batch, Hq, Lq, Dv) if q.ndim > 2 else (Lq, Dv)
    _check_offset(offset, batch, qkv)
    if mask is not None and program is not None:
        _check_mask_device(program, q)
        mask.check_shapes(batch, Hq, Lq, Lk, offset)
    _check_bias(given.bias, Hq, (*out_shape[:-1], Lk), qkv)
    _check_sink(given.sink, Hq, qkv)
    strides, copied = _strides(qkv, given.bias, batch)
    B = math.prod(batch)
    return Spec(
        dtype=q.dtype, device=q.device, batch=batch, rank=q.ndim,
        B=B, Hq=Hq, Hkv=Hkv, Lq=Lq, Lk=Lk, D=D, Dv=Dv,
        q_stride=strides["q"], k_stride=strides["k"], v_stride=strides["v"],
        code=program.code if program is not None else (),
        offset=Lk - Lq if offset is None else None if isinstance(offset, Tensor) else offset,
        bias=_bias_kind(given.bias),
        bias_dtype=given.bias.dtype if isinstance(given.bias, Tensor) else None,
        bias_stride=strides.get("bias", (0, 0, 0, 0)),
        scale=(1 / math.sqrt(D) if D else 1.0) if given.scale is None else given.scale,
        softcap=given.softcap, sink=given.sink is not None, dropout=given.dropout,
        return_lse=given.return_lse,
        is_plain=_is_plain(program, offset, given),
        is_direct=not copied and all(s[3] == 1 for s in strides.values()), copied=copied, out_shape=out_shape,
        out_stride=ordered_like(strides["q"], (B, Hq, Lq, Dv)),
    )  # fmt: skip


def _is_plain(program: Program | None, offset: int | Tensor | None, given: _Options) -> bool:
    if isinstance(offset, Tensor) or (program is not None and program.tensors):
        return False
    return given.bias is None and given.sink is None and not given.dropout


def _check_tensors(qkv: Trio) -> None:
    for name, x in zip("qkv", qkv, strict=True):
        if not isinstance(x, Tensor):
            _fail(TypeError, name, "a torch.Tensor", describe(x))
        if x.is_nested or x.layout is not torch.strided:
            nested = "a nested tensor; attention takes q, k and v all nested with layout=torch.jagged"
            _fail(TypeError, name, "a dense (strided) tensor", nested if x.is_nested else x.layout)
    for name, x in zip("qkv", qkv, strict=True):
        if x.dtype not in DTYPES:
            _fail(TypeError, name, "dtype float64, float32, bfloat16 or float16", x.dtype, qkv)
    q = qkv[0]
    for name, x in zip("kv", qkv[1:], strict=True):
        if x.dtype is not q.dtype:
            _fail(TypeError, name, f"q's dtype {q.dtype}", x.dtype, qkv)
        if x.device != q.device:
            _fail(ValueError, name, f"q's device {q.device}", x.device, qkv)


def _check_sizes(qkv: Trio) -> tuple[int, ...]:
    """The broadcast batch dims."""
    q, k, v = (x.shape for x in qkv)
    if len(q) < 2:
        _fail(ValueError, "q", "(L, D), (H, L, D) or (..., H, L, D)", tuple(q), qkv)
    for name, x in (("k", k), ("v", v)):
        if len(x) != len(q):
            _fail(ValueError, name, f"{len(q)} dims as in q", len(x), qkv)
    if k[-1] != q[-1]:
        _fail(ValueError, "k", f"last dim D = {q[-1]} as in q", k[-1], qkv)
    if v[-2] != k[-2]:
        _fail(ValueError, "v", f"Lk = {k[-2]} rows as in k", v[-2], qkv)
    if len(q) == 2:
        return ()
    if v[-3] != k[-3]:
        _fail(ValueError, "v", f"Hkv = {k[-3]} heads as in k", v[-3], qkv)
    if q[-3] != k[-3] and (k[-3] == 0 or q[-3] % k[-3]):
        _fail(ValueError, "k", f"a number of heads Hkv that divides Hq = {q[-3]}", k[-3], qkv)
    return tuple(_broadcast(sizes, qkv) for sizes in zip(q[:-3], k[:-3], v[:-3], strict=True))


def _broadcast(sizes: tuple[int, int, int], qkv: Trio) -> int:
    a, b, c = sizes
    size = a if a != 1 else b if b != 1 else c
    if a not in (1, size) or b not in (1, size) or c not in (1, size):
        _fail(ValueError, "q, k, v", "batch dims that are equal or 1", f"{a}, {b} and {c}", qkv)
    return size


def _check_scalars(given: _Options) -> None:
    if given.scale is not None and not -math.inf < given.scale < math.inf:
        _fail(ValueError, "scale", "a finite number", given.scale)
    if given.softcap is not None and not 0 < given.softcap < math.inf:
        _fail(ValueError, "softcap", "a finite number above 0", given.softcap)
    if not 0 <= given.dropout <= 1:
        _fail(ValueError, "dropout", "a probability from 0 to 1", given.dropout)


def _check_offset(offset: int | Tensor | None, batch: tuple[int, ...], qkv: Trio) -> None:
    if not isinstance(offset, Tensor):
        return
    flat = (math.prod(batch),)
    if tuple(offset.shape) not in (flat, batch):
        expected = f"shape {flat}" if batch == flat else f"shape {flat} or {batch}"
        _fail(ValueError, "offset", expected, tuple(offset.shape), qkv)
    if offset.device != qkv[0].device:
        _fail(ValueError, "offset", f"q's device {qkv[0].device}", offset.device, qkv)


def _check_mask_device(program: Program, q: Tensor) -> None:
    for x in program.tensors:
        if x.device != q.device and not q.is_meta:
            _fail(ValueError, "mask", f"tensors on q's device, as from mask.to({str(q.device)!r})", x.device)


def _bias_kind(bias: Bias | None) -> str:
    if isinstance(bias, Tensor):
        return "tensor"
    return "alibi" if isinstance(bias, Alibi) else "relative" if isinstance(bias, RelativeBias) else "none"


def _check_bias(bias: Bias | None, Hq: int, target: tuple[int, ...], qkv: Trio) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor | Alibi | RelativeBias):
        _fail(TypeError, "bias", "a float tensor, scores.Alibi or scores.RelativeBias", describe(bias))
    if isinstance(bias, Tensor) and bias.dtype is torch.bool:
        _fail(TypeError, "bias", "a float tensor (a bool tensor goes to mask=)", describe(bias))
    tensor = learned(bias)
    assert tensor is not None
    _check_learned("bias", tensor, qkv)
    if isinstance(bias, Tensor):
        if not broadcasts(bias.shape, target):
            expected = f"a shape broadcastable to (..., Hq, Lq, Lk) = {target}"
            _fail(ValueError, "bias", expected, tuple(bias.shape), qkv)
    elif bias.heads != Hq:
        _fail(ValueError, "bias", f"a {type(bias).__name__} for Hq = {Hq} heads", bias.heads, qkv)


def _check_learned(name: str, x: Tensor, qkv: Trio) -> None:
    q = qkv[0]
    if x.dtype not in (q.dtype, torch.float32):
        both = "" if q.dtype is torch.float32 else " or torch.float32"
        _fail(TypeError, name, f"dtype {q.dtype}{both}", x.dtype, qkv)
    if x.layout is not torch.strided:
        _fail(TypeError, name, "a dense (strided) tensor", x.layout)
    if x.device != q.device:
        _fail(ValueError, name, f"q's device {q.device}", x.device, qkv)


def _check_sink(sink: Tensor | None, Hq: int, qkv: Trio) -> None:
    if sink is None:
        return
    if not isinstance(sink, Tensor):
        _fail(TypeError, "sink", "a tensor of shape (Hq,)", describe(sink))
    _check_learned("sink", sink, qkv)
    if tuple(sink.shape) != (Hq,):
        _fail(ValueError, "sink", f"shape (Hq,) = {(Hq,)}", tuple(sink.shape), qkv)


# Strides


def _strides(
    qkv: Trio, bias: Bias | None, batch: tuple[int, ...]
) -> tuple[dict[str, Strides], tuple[str, ...]]:
    """Strides for (B, H, L, D), and the names of the tensors that must be copied to have them."""
    given = dict(zip("qkv", qkv, strict=True)) | ({"bias": bias} if isinstance(bias, Tensor) else {})
    strides, copied = {}, []
    for name, x in given.items():
        outer = _merged_stride(x.shape[:-3], x.stride()[:-3], batch)
        H, L, D = (0, 0, 0, *x.stride())[-3:]
        if outer is None:
            copied.append(name)
            outer, H, L, D = _contiguous(x.shape[-3:])
        if name == "bias":
            H, L, D = (s if n != 1 else 0 for n, s in zip((1, 1, 1, *x.shape)[-3:], (H, L, D), strict=True))
        strides[name] = (outer, H, L, D)
    return strides, tuple(copied)


def _contiguous(own: tuple[int, ...]) -> Strides:
    """Strides of a contiguous (B, *own)."""
    H, L, D = own
    return H * L * D, L * D, D, 1


def _merged_stride(shape: tuple[int, ...], stride: tuple[int, ...], batch: tuple[int, ...]) -> int | None:
    """The stride of all batch dims taken as one, or None when no single stride does it."""
    if 0 in batch:
        return 0
    missing = len(batch) - len(shape)
    shape, stride = (1,) * missing + tuple(shape), (0,) * missing + tuple(stride)
    dims = [(b, 0 if n == 1 else s) for b, n, s in zip(batch, shape, stride, strict=True) if b != 1]
    for (_, outer), (size, inner) in pairwise(dims):
        if outer != size * inner:
            return None
    return dims[-1][1] if dims else 0


def ordered_like(stride: tuple[int, ...], shape: tuple[int, ...]) -> Strides:
    """Dense strides of `shape`, its dims in the memory order of `stride`; broadcast dims keep their place."""
    real = [d for d in range(4) if shape[d] > 1 and stride[d] > 0]
    order = list(range(4))
    for place, dim in zip(real, descending(real, stride), strict=True):
        order[place] = dim
    dense, step = [0] * 4, 1
    for dim in reversed(order):
        dense[dim], step = step, step * max(shape[dim], 1)
    return dense[0], dense[1], dense[2], dense[3]


def descending(dims: Sequence[int], stride: tuple[int, ...]) -> list[int]:
    """The dims by falling stride; compared one by one, because symbols cannot be sorted."""
    order: list[int] = []
    for dim in dims:
        order.insert(sum(1 for other in order if stride[other] >= stride[dim]), dim)
    return order


def _copy(spec: Spec, name: str, x: Tensor) -> Tensor:
    return x.expand(*spec.batch, *x.shape[-3:]).contiguous() if name in spec.copied else x


def _copy_bias(spec: Spec, bias: Bias | None) -> Bias | None:
    if "bias" not in spec.copied:
        return bias
    assert isinstance(bias, Tensor)
    return bias.expand(*spec.batch, *bias.shape[-3:]).contiguous()
