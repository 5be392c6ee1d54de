"""The native backend: allocates the results, flattens a Problem to integers and calls the compiled core.

No tensor goes further down than this file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._call.linear import SEGMENT
from ..._call.linear import LinearCall as Linear
from ..._call.linear import LinearResult as Result
from ..._call.memory import MAX_SPECS
from ..._call.spec import Problem, Spec
from ..._call.stored import GROUP, HALF, New, Stored
from ..._tools.arguments import describe

VARIABLE = "REGARD_ISA"
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
BIASES = {"none": 0, "tensor": 1, "alibi": 2, "relative": 3}
STORES = {"float": 0, "int8": 1, "int4": 2}
CODES = {"int8": (torch.int8, GROUP), "int4": (torch.uint8, HALF)}  # and how many hold a group
PLAIN = [0] * 9  # the extras of a call that has none
NOT_STORED = [0] * 11  # K and V are tensors

_core: Any = None
_missing: str | None = None
try:
    from ... import _core
except ImportError as error:
    _missing = f"the compiled core could not be loaded ({error})"


def _start() -> bool:
    """Choose the instruction set that the environment asks for and find PyTorch's threads."""
    forced = os.environ.get(VARIABLE)
    if forced and not _core.use(forced):
        raise ValueError(
            f"environment variable {VARIABLE}: expected one of {', '.join(_core.runnable())}, got {forced!r}"
        )
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return bool(_core.open_pool(str(library)))


_pool = _start() if _core is not None else False


def reason_unavailable() -> str | None:
    """Why no problem can run here, or None."""
    return _missing


def reasons(problem: Problem) -> tuple[str, ...]:
    """Why this problem cannot run here; () when it can."""
    device = problem.spec.device.type
    if device != "cpu":
        return (f"native kernels run on the CPU, the tensors are on {device}",)
    return ()


def forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """out (..., Hq, Lq, Dv) in q's dtype and memory order, LSE (..., Hq, Lq) or None."""
    spec, q, k, v = problem[:4]
    prepared = spec.memo.get("native") or _prepare(spec, q)
    call, like_q, plain = prepared
    out = torch.empty_like(q) if like_q else _empty_out(spec, q)
    lse = q.new_empty(spec.lse_shape, dtype=spec.lse_dtype) if spec.return_lse else None
    if type(out) is not Tensor and isinstance(out, FakeTensor):
        return _as_given(out, spec), lse
    lse_address = lse.data_ptr() if lse is not None else 0
    if plain:
        call.forward(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address, spec.offset)
    else:
        extras, tensors, alive = extras_of(problem)
        where = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address, spec.offset or 0)
        call.forward_with(*where, extras, tensors)
        del alive
    return _as_given(out, spec), lse


class Saved(NamedTuple):
    """Results of a forward pass and what backward starts from besides them.

    The stats say what the LSE says, but exactly: with scores of -1e4 a float32 LSE is wrong by 5e-4, and so
    would be all weights. The rest keeps the rounding of a 16-bit output out of the gradients.
    """

    out: Tensor  # (B, Hq, Lq, Dv)
    lse: Tensor | None
    stats: (
        Tensor  # (2, B, Hq, Lq): each row's shift, an integer in base 2, and its softmax's sum at that shift
    )
    rest: Tensor | None  # like out, for 16-bit dtypes: what rounding took from it


def forward_saving(problem: Problem) -> Saved:
    """The forward pass of a canonical problem that is going to be differentiated."""
    spec, q, k, v = problem[:4]
    call, like_q, _ = spec.memo.get("native") or _prepare(spec, q)
    out = torch.empty_like(q) if like_q else _empty_out(spec, q)
    lse = q.new_empty(spec.lse_shape, dtype=spec.lse_dtype) if spec.return_lse else None
    stats = q.new_empty((2, spec.B, spec.Hq, spec.Lq), dtype=spec.lse_dtype)
    rest = torch.empty_like(out) if spec.dtype.itemsize == 2 else None
    if type(out) is not Tensor and isinstance(out, FakeTensor):
        return Saved(out, lse, stats, rest)
    extras, tensors, alive = extras_of(problem, stats, rest)
    where = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), _address(lse), spec.offset or 0)
    call.forward_with(*where, extras, tensors)
    del alive
    return Saved(out, lse, stats, rest)


# Keys and values as a cache keeps them


class StoredCall(NamedTuple):
    """What is known of a call over stored keys, whatever their number."""

    call: Any
    spec: Spec  # Lk and the offset are those of one call among many
    like_q: bool
    capacity: int


def prepare_stored(spec: Spec, q: Tensor, stored: Stored) -> StoredCall | None:
    """None when there are so many query rows that other kernels are better, even on gathered keys."""
    _check_stored(spec, stored)
    table = stored.table
    call = _attention(spec, stored)
    if not call.decodes():
        return None
    capacity = stored.k.shape[2] if table is None else table.shape[1] * stored.page
    like_q = q.shape == spec.out_shape and _strides_agree(torch.empty_like(q, device="meta"), spec)
    return StoredCall(call, spec, like_q, capacity)


def forward_stored(
    ready: StoredCall,
    q: Tensor,
    stored: Stored,
    offset: int,
    extras: list[int],
    tensors: list[int],
    new: New | None = None,
) -> tuple[Tensor, Tensor | None]:
    """out (B, Hq, Lq, Dv) and the LSE (B, Hq, Lq) or None; `extras` and `tensors` as `_extras` makes them.

    With `new` its one token is written first: it is the last of the stored ones.
    """
    call, spec, like_q, capacity = ready
    k, v, k_scale, v_scale, table, _, _, length, _, _ = stored
    if not 0 <= length <= capacity:
        raise ValueError(f"stored.length: expected 0 to {capacity}, the rows that are there, got {length}")
    out = torch.empty_like(q) if like_q else _empty_out(spec, q)
    lse = q.new_empty(spec.lse_shape, dtype=spec.lse_dtype) if spec.return_lse else None
    where = [
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        offset, length, 0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        *((0, 0) if table is None else (table.data_ptr(), table.stride(0))),
    ]  # fmt: skip
    if new is not None:
        where += _token(*new)
    try:
        call.decode(where, extras, tensors)
    except IndexError:
        raise ValueError(
            f"stored.table: expected page numbers from 0 to {k.shape[0] - 1} wherever a key is seen"
        ) from None
    return out, lse


def _token(k: Tensor, v: Tensor | None) -> list[int]:
    """Addresses, and strides along samples, heads and channels."""
    numbers = [k.data_ptr(), k.stride(0), k.stride(-3), k.stride(-1)]
    return numbers + ([0] * 4 if v is None else [v.data_ptr(), v.stride(0), v.stride(-3), v.stride(-1)])


def write(stored: Stored, starts: Sequence[int], counts: Sequence[int], k: Tensor, v: Tensor | None) -> None:
    """`stored.write(starts, counts, k, v)`. The caller has checked shapes, dtypes and room."""
    table, sides = stored.table, [(k, stored.k, stored.k_scale, stored.D)]
    if v is not None:
        sides.append((v, stored.v, stored.v_scale, stored.Dv))
    numbers = [
        DTYPES[k.dtype], STORES[stored.kind], k.shape[0], stored.k.shape[1],
        *((0, 0) if table is None else (table.data_ptr(), table.stride(0))), stored.page, stored.k.shape[0],
    ]  # fmt: skip
    for x, target, scale, width in sides:
        numbers += [x.data_ptr(), *x.stride(), target.data_ptr(), *target.stride()]
        numbers += [0] * 5 if scale is None else [scale.data_ptr(), *scale.stride()[:3], 1]
        numbers.append(width)
    _core.write(numbers, starts, counts)


def _check_stored(spec: Spec, stored: Stored) -> None:
    """That the core can read what it is told to read."""
    k, v, k_scale, v_scale, table, page, kind, _, D, Dv = stored
    if kind not in STORES:
        raise ValueError(f"stored.kind: expected one of {', '.join(STORES)}, got {kind!r}")
    if table is not None and (table.dtype is not torch.int32 or table.ndim != 2 or table.stride(1) != 1):
        raise TypeError(f"stored.table: expected int32 (B, pages), rows contiguous, got {describe(table)}")
    if table is not None and (page < 16 or page & (page - 1)):
        raise ValueError(f"stored.page: expected a power of two from 16 on, got {page}")
    outer = (spec.B, 1) if table is None else (k.shape[0],)
    rows = k.shape[2] if table is None else page
    for name, x, scale, width in (("k", k, k_scale, D), ("v", v, v_scale, Dv)):
        dtype, held = (spec.dtype, width) if kind == "float" else _codes(kind, width)
        if (
            x.dtype is not dtype
            or x.ndim != 4
            or x.shape[0] not in outer
            or x.shape[1:] != (spec.Hkv, rows, held)
        ):
            expected = f"{dtype} ({outer[0]}, {spec.Hkv}, {rows}, {held})"
            raise ValueError(f"stored.{name}: expected {expected}, got {describe(x)}")
        if kind != "float":
            _check_codes(name, x, scale, -(-width // GROUP), kind)


def _codes(kind: str, width: int) -> tuple[torch.dtype, int]:
    dtype, held = CODES[kind]
    return dtype, -(-width // GROUP) * held


def _check_codes(name: str, codes: Tensor, scale: Tensor | None, groups: int, kind: str) -> None:
    own = (groups,) if kind == "int8" else (groups, 2)
    shape = (*codes.shape[:3], *own)
    if scale is None or scale.dtype is not torch.float16 or scale.shape != shape:
        raise ValueError(f"stored.{name}_scale: expected float16 {shape}, got {describe(scale)}")
    if codes.stride(3) != 1 or not scale[0, 0, 0].is_contiguous():
        raise ValueError(f"stored.{name}: expected codes and scales whose rows are contiguous")


def _stored_numbers(stored: Stored | None) -> list[int]:
    """The kind of store, four strides each of K's and V's scales, the size of a page, and pages."""
    if stored is None:
        return NOT_STORED
    scales = (stored.k_scale, stored.v_scale)
    strides = [n for x in scales for n in ((0, 0, 0) if x is None else _outer(x)) + (1,)]
    paged = (0, 0) if stored.table is None else (stored.page, stored.k.shape[0])
    return [STORES[stored.kind], *strides, *paged]


def _outer(x: Tensor) -> tuple[int, int, int]:
    """Strides of samples (or pages), heads and rows."""
    return (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2))


class Gradients(NamedTuple):
    """Of (B, H, L, D) inputs; None where not asked for."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None  # (1 or B, 1 or Hq, 1 or Lq, 1 or Lk)
    by_head: Tensor | None  # (Hq,) ALiBi's slopes or (Hq, distances)
    sink: Tensor | None  # (Hq,)


def backward(
    problem: Problem,
    out: Tensor,
    stats: Tensor,
    rest: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: tuple[bool, bool, bool, bool, bool, bool],
) -> Gradients:
    """The gradients asked for, in the order of `Gradients`; those of q, k and v have q's dtype."""
    spec, q, k, v = problem[:4]
    grads = _empty_gradients(problem, wanted)
    dout = dout if dout.dtype is spec.dtype else dout.to(spec.dtype)
    dlse = dlse.to(spec.lse_dtype).contiguous() if dlse is not None else None
    extras, tensors, alive = extras_of(problem)
    numbers = [
        *map(_address, (out, rest, dout, dlse, stats, *grads)),
        *dout.stride(), *_strides(grads.k), *_strides(grads.v), *_broadcast_strides(grads.bias),
    ]  # fmt: skip
    where = (q.data_ptr(), k.data_ptr(), v.data_ptr(), spec.offset or 0)
    (spec.memo.get("native") or _prepare(spec, q))[0].backward(*where, extras, tensors, numbers)
    del alive
    return grads if grads.bias is None else grads._replace(bias=grads.bias.to(spec.bias_dtype))


def _empty_gradients(problem: Problem, wanted: tuple[bool, ...]) -> Gradients:
    """Room for the gradients."""
    spec, q, k, v = problem[:4]
    nothing = spec.B * spec.Hq * spec.Lq * spec.Lk == 0
    like = torch.zeros_like if nothing else torch.empty_like
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if wanted[0] else None
    dk, dv = like(k) if wanted[1] else None, like(v) if wanted[2] else None
    if not any(wanted[3:]):
        return Gradients(dq, dk, dv, None, None, None)
    return Gradients(
        dq, dk, dv, _empty_bias(problem) if wanted[3] else None,
        torch.zeros_like(problem.by_head) if wanted[4] and problem.by_head is not None else None,
        q.new_zeros(spec.Hq, dtype=spec.lse_dtype) if wanted[5] else None,
    )  # fmt: skip


def _empty_bias(problem: Problem) -> Tensor | None:
    """In the dtype of the sums, unless a bias of 16 bits has a gradient for each pair."""
    spec, bias = problem.spec, problem.bias
    if not isinstance(bias, Tensor):
        return None
    has_pairs = bias.shape[-2] == spec.Lq and bias.shape[-1] == spec.Lk
    dtype = torch.float64 if not has_pairs else bias.dtype if bias.dtype.itemsize == 2 else spec.lse_dtype
    empty = spec.B * spec.Hq * spec.Lq * spec.Lk == 0
    return (torch.zeros if empty else torch.empty)(bias.shape, dtype=dtype, device=bias.device)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return x.stride() if x is not None else (0, 0, 0, 0)


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """0 in dims of size 1."""
    return (
        tuple(s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True))
        if x is not None
        else (0,) * 4
    )


def _prepare(spec: Spec, q: Tensor) -> tuple[Any, bool, bool]:
    """The compiled call, whether the output is laid out like q, and whether q, k and v are all it takes."""
    like_q = spec.rank == 4 and q.shape == spec.out_shape
    like_q = like_q and _strides_agree(torch.empty_like(q, device="meta"), spec)
    prepared = spec.memo["native"] = (_attention(spec), like_q, spec.is_plain)
    return prepared


def _strides_agree(x: Tensor, spec: Spec) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), spec.out_stride, strict=True))


def _empty_out(spec: Spec, q: Tensor) -> Tensor:
    return q.new_empty_strided((spec.B, spec.Hq, spec.Lq, spec.Dv), spec.out_stride)


def _as_given(out: Tensor, spec: Spec) -> Tensor:
    """(B, Hq, Lq, Dv) with the caller's own batch dims."""
    if spec.rank == 4:
        return out
    if spec.rank == 2:
        return out[0, 0]
    return out[0] if spec.rank == 3 else out.unflatten(0, spec.batch)


def _attention(spec: Spec, stored: Stored | None = None) -> Any:
    bias_dtype = DTYPES[spec.bias_dtype] if spec.bias_dtype is not None else 0
    sizes = (spec.B, spec.Hq, spec.Hkv, spec.Lq, spec.Lk, spec.D, spec.Dv)
    k, v = (
        (spec.k_stride, spec.v_stride) if stored is None else ((*_outer(x), x.stride(3)) for x in stored[:2])
    )
    strides = (*spec.q_stride, *k, *v, *spec.out_stride, *spec.bias_stride)
    drop_below = round(spec.dropout * 65536)
    keep_scale = 1 / (1 - spec.dropout) if spec.dropout < 1 else 0.0
    return _core.Attention(
        [DTYPES[spec.dtype], bias_dtype, BIASES[spec.bias], *sizes, *strides, *_stored_numbers(stored)],
        list(spec.code),
        spec.scale,
        spec.softcap or 0.0,
        drop_below,
        keep_scale,
    )


def extras_of(
    problem: Problem, stats: Tensor | None = None, rest: Tensor | None = None
) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """The rest of a call as integers, and the tensors that must live until it ends."""
    spec, bias = problem.spec, problem.bias
    by_head, low, count = _by_head(problem)
    sink = problem.sink.detach().to(spec.lse_dtype).contiguous() if problem.sink is not None else None
    offsets = problem.offset.contiguous() if problem.offset is not None else None
    extras = [
        bias.data_ptr() if isinstance(bias, Tensor) else 0,
        _address(by_head), low, count, _address(sink), _address(offsets), problem.seed,
        _address(stats), _address(rest),
    ]  # fmt: skip
    return extras, _mask_numbers(problem.tensors), (by_head, sink, offsets)


def _address(x: Tensor | None) -> int:
    return x.data_ptr() if x is not None else 0


def _by_head(problem: Problem) -> tuple[Tensor | None, int, int]:
    """ALiBi's slopes, or the relative bias by distance with its first distance and their number."""
    numbers = problem.by_head
    if numbers is None:
        return None, 0, 0
    numbers = numbers.detach()
    return (numbers, 0, 0) if numbers.ndim == 1 else (numbers, -(numbers.shape[1] // 2), numbers.shape[1])


def _mask_numbers(tensors: tuple[Tensor, ...]) -> list[int]:
    """Nine integers for each: address, sizes and strides for (b, h, q, k), 0 where broadcast."""
    numbers: list[int] = []
    for x in tensors:
        missing = 4 - x.ndim
        sizes = (x.shape[0], *(1,) * missing, *x.shape[1:])
        strides = (x.stride(0), *(0,) * missing, *x.stride()[1:])
        numbers += [x.data_ptr(), *sizes, *(s if n > 1 else 0 for n, s in zip(sizes, strides, strict=True))]
    return numbers


def look(problem: Problem, facts: list[int]) -> None:
    """Find facts about the weights: `facts` are the numbers of the core's Facts."""
    spec, q, k = problem[:3]
    call, *_ = spec.memo.get("native") or _prepare(spec, q)
    extras, tensors, alive = extras_of(problem)
    call.evidence(q.data_ptr(), k.data_ptr(), spec.offset or 0, extras, tensors, facts)
    del alive


# Linear attention


class LinearKept(NamedTuple):
    """What backward starts from besides the inputs."""

    S: Tensor  # (B, Hkv, segments, D, Dv): the state before every 512th token
    z: Tensor | None  # (B, Hkv, segments, D)
    errors: Tensor | None  # (B, Hkv, L, Dv): the delta rule's v less what the state held of it


def linear(p: Linear) -> Result:
    """The forward pass."""
    return _linear_forward(p, None)


def linear_saving(p: Linear) -> tuple[Result, LinearKept]:
    """The forward pass of a call that is going to be differentiated."""
    (B, Hkv, L, D), Dv = p.k.shape, p.v.shape[3]
    segments = -(-L // SEGMENT)
    S = p.k.new_empty((B, Hkv, segments, D, Dv), dtype=p.dtype)
    z = p.k.new_empty((B, Hkv, segments, D), dtype=p.dtype) if p.normalize else None
    errors = p.k.new_empty((B, Hkv, L, Dv), dtype=p.dtype) if p.beta is not None else None
    kept = LinearKept(S, z, errors)
    return _linear_forward(p, kept), kept


def _linear_forward(p: Linear, kept: LinearKept | None) -> Result:
    (B, Hkv, _, D), (_, Hq, L, _), Dv = p.k.shape, p.q.shape, p.v.shape[3]
    out = p.q.new_empty_strided((B, Hq, L, Dv), p.out_stride)
    S = p.k.new_empty((B, Hkv, D, Dv), dtype=p.dtype)
    z = p.k.new_empty((B, Hkv, D), dtype=p.dtype) if p.normalize else None
    where, alive = _linear_addresses(p, kept)
    where[3], where[9], where[10] = out.data_ptr(), S.data_ptr(), _address(z)
    _linear_core(p).forward(where)
    del alive
    return Result(out, S, z)


def linear_backward(
    p: Linear, kept: LinearKept, dout: Tensor, dS: Tensor | None, dz: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_decay, beta, S and z; None for what was not given."""
    dout = dout if dout.dtype is p.q.dtype else dout.to(p.q.dtype)
    dS, dz = (x if x is None else x.to(p.dtype).contiguous() for x in (dS, dz))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in p[:3])
    gates = [None if x is None else x.new_empty(x.shape) for x in (p.log_decay, p.beta)]
    (B, Hkv, _, D), Dv = p.k.shape, p.v.shape[3]
    S = p.k.new_empty((B, Hkv, D, Dv), dtype=p.dtype)
    z = p.k.new_empty((B, Hkv, D), dtype=p.dtype) if p.normalize else None
    where, alive = _linear_addresses(p, kept)
    numbers = [
        *map(_address, (dout, dS, dz, dq, dk, dv, *gates, S, z)),
        *dout.stride(), *dq.stride(), *dk.stride(), *dv.stride(),
    ]  # fmt: skip
    _linear_core(p).backward(where, numbers)
    del alive
    return dq, dk, dv, *gates, S if p.S is not None else None, z if p.z is not None else None


def _linear_addresses(p: Linear, kept: LinearKept | None) -> tuple[list[int], tuple[Tensor | None, ...]]:
    """Those of the inputs and of what is kept; the results' are 0. And the tensors they belong to."""
    alive = tuple(None if x is None else x.contiguous() for x in (p.log_decay, p.beta, p.lengths, p.S, p.z))
    log_decay, beta, lengths, S, z = map(_address, alive)
    more = (0, 0, 0) if kept is None else tuple(map(_address, kept))
    qkv = (p.q.data_ptr(), p.k.data_ptr(), p.v.data_ptr())
    return [*qkv, 0, log_decay, beta, lengths, S, z, 0, 0, *more], alive


def _linear_core(p: Linear) -> Any:
    (B, Hkv, _, D), (_, Hq, L, _), Dv = p.k.shape, p.q.shape, p.v.shape[3]
    numbers = (DTYPES[p.q.dtype], B, Hq, Hkv, L, D, Dv, p.normalize)
    return _linear_made((*numbers, *p.q.stride(), *p.k.stride(), *p.v.stride(), *p.out_stride), p.scale)


@functools.lru_cache(MAX_SPECS)
def _linear_made(numbers: tuple[int, ...], scale: float) -> Any:
    return _core.Linear(list(numbers), scale)


class Cost(NamedTuple):
    """What the kernels would do, from the spans they would use."""

    pairs: int  # (query, key) pairs seen, over all samples and heads
    touched: int  # pairs computed
    full: int  # panel x key: all 16 query rows see the key
    partial: int
    empty: int
    tasks: int
    scratch_bytes: int  # of all threads
    threads: int


def cost(problem: Problem) -> Cost:
    spec = problem.spec
    offsets = problem.offset.contiguous() if problem.offset is not None else None
    extras = [*PLAIN[:5], _address(offsets), 0, 0, 0]
    found = Cost(*_attention(spec).cost(spec.offset or 0, extras, _mask_numbers(problem.tensors)))
    return found._replace(scratch_bytes=found.scratch_bytes * found.threads)


def decodes(problem: Problem) -> bool:
    """Whether the call has so few query rows that it is cut along its keys."""
    return bool(_attention(problem.spec).decodes())


def runs(
    problem: Problem, batch: int, head: int, row: int, count: int, step: int = 1
) -> list[tuple[int, int, int]]:
    """The keys that query rows row, row + step, ... see: (begin, end, set of rows as bits)."""
    spec = problem.spec
    offsets = problem.offset.contiguous() if problem.offset is not None else None
    extras = [*PLAIN[:5], _address(offsets), 0, 0, 0]
    found: list[tuple[int, int, int]] = _attention(spec).runs(
        batch, head, row, step, count, spec.offset or 0, extras, _mask_numbers(problem.tensors)
    )
    return found


def fma_probe(rounds: int) -> float:
    """Multiply-adds in registers alone, on this thread; how many FLOPs that was."""
    return float(_core.fma_probe(rounds))


def read_probe(x: Tensor) -> None:
    """Read contiguous float32 numbers once, on this thread."""
    _core.read_probe(x.data_ptr(), x.numel())


def isas() -> list[str]:
    """The instruction sets that this CPU can run."""
    return list(_core.runnable()) if _core is not None else []


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Run with another instruction set for a while."""
    if name not in isas():
        raise ValueError(f"name: expected one of {', '.join(isas())}, got {name!r}")
    before = _core.isa()
    _core.use(name)
    try:
        yield
    finally:
        _core.use(before)


def info() -> dict[str, Any]:
    if _core is None:
        return {"isa": None, "missing": _missing}
    return {
        "isa": _core.isa(),
        "compiled": _core.compiled(),
        "runnable": _core.runnable(),
        "forced": os.environ.get(VARIABLE),
        "threads": _core.threads(),
        "threads_from": "PyTorch's pool"
        if _pool
        else "the calling thread alone (PyTorch's pool was not found)",
        "compiler": _core.compiler(),
    }
