"""Attention over stored keys, and writes to their storage. For caches and integrations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._backends.dispatch import choose
from .._backends.native import attention as _native, core, stored as _stored
from .._call.make import NO_OPTIONS, any_needs_grad, make, needs_grad
from .._call.memory import Key, remember
from .._call.spec import MAX_OFFSET, Options, Problem, learned
from .._call.stored import New, Stored
from .._tools.listeners import listeners
from .._tools.watching import in_autocast, is_watched
from ..masks import Mask
from .attention import attention

_prepared: dict[Key, _stored.StoredCall] = {}


def attend_stored(
    q: Tensor, stored: Stored, options: Options = NO_OPTIONS, impl: str = "auto", new: New | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `attention(q, *stored.dense(q.dtype), ...)` for q (B, Hq, Lq, D), without dropout.

    With few query rows the native kernel reads the storage in place. A later call that differs only
    in length, offset and data then skips the checks.

    `new` holds k and v of one new token of each sample. If given, it is written as the last stored
    token before attention is computed. The caller has checked the shapes and dtypes of `new`.
    """
    key = None if listeners else _key(q, stored, options, impl)  # listeners are notified by `attention` only
    prepared = _prepared.get(key) if key is not None else None
    if prepared is not None:
        out, lse = _repeat(prepared, q, stored, options, new)
        return out if lse is None else (out, lse)
    if new is not None:
        B = new[0].shape[0]
        write_stored(stored, (stored.length - 1,) * B, (1,) * B, *new)
    problem = None if listeners else _problem(q, stored, options)
    prepared = _prepare(problem, stored, impl) if problem is not None else None
    if problem is None or prepared is None:
        k, v = stored.dense(q.dtype)
        if any_needs_grad(q, options.sink, learned(options.bias)):
            k, v = k.clone(), v.clone()  # backward reads k and v, which later writes may change
        result: Tensor | tuple[Tensor, Tensor] = attention(q, k, v, **options._asdict(), impl=impl)
        return result
    if key is not None:
        remember(_prepared, key, prepared)
    operands, keepalive = _native.operands_of(problem)
    out, lse = _stored.forward_stored(prepared, problem.q, stored, problem.spec.offset or 0, operands)
    del keepalive
    return out if lse is None else (out, lse)


def write_stored(
    stored: Stored, starts: Sequence[int], counts: Sequence[int], k: Tensor, v: Tensor | None
) -> None:
    """Runs `stored.write(starts, counts, k, v)`: in the core if possible, else in PyTorch.

    The caller has checked shapes, dtypes and capacity.
    """
    k = k if k.ndim == 4 else k.unsqueeze(1)
    (_stored.write if _core_reads(k, k if v is None else v) else Stored.write)(stored, starts, counts, k, v)


def _core_reads(k: Tensor, v: Tensor) -> bool:
    """Returns whether the core can read these tensors in place and the call is not watched."""
    if core.reason_unavailable() is not None or k.device.type != "cpu":
        return False
    return not (k.is_neg() or v.is_neg() or is_watched(k, v, v))


def _key(q: Tensor, stored: Stored, options: Options, impl: str) -> Key | None:
    """Returns the key under which a prepared call is cached.

    The key does not contain length, offset and data. Returns None if the call cannot be cached.
    """
    mask, offset, bias, scale, softcap, sink, _, _, return_lse = options
    k, v, k_scale, v_scale, table, page, kind, _, D, Dv = stored
    if bias is not None or q.is_neg() or in_autocast() or is_watched(q, k, v):
        return None
    if needs_grad(q, k, v) or (sink is not None and any_needs_grad(sink)) or not _is_valid(offset):
        return None
    if not (q.is_cpu and k.is_cpu and (sink is None or sink.is_cpu)):
        return None
    code = None
    if mask is not None:
        program = mask.lower() if isinstance(mask, Mask) else None
        if program is None or program.tensors:
            return None
        code = program.code
    return (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype,
        None if k_scale is None else k_scale.stride(), None if v_scale is None else v_scale.stride(),
        None if table is None else table.shape, page, kind, D, Dv, code,
        None if sink is None else (sink.shape, sink.dtype), type(offset), scale, softcap, return_lse, impl,
    )  # fmt: skip


def _is_valid(offset: object) -> bool:
    return offset is None or type(offset) is Tensor or (type(offset) is int and abs(offset) <= MAX_OFFSET)


def _repeat(
    prepared: _stored.StoredCall, q: Tensor, stored: Stored, options: Options, new: New | None
) -> tuple[Tensor, Tensor | None]:
    """Runs a call that differs from the checked call `prepared` only in length, offset and data."""
    spec, offset, sink = prepared.spec, options.offset, options.sink
    if sink is not None:
        sink = sink.detach().to(spec.lse_dtype).contiguous()
    offsets = _checked_offsets(offset, spec.B) if type(offset) is Tensor else None
    start = offset if type(offset) is int else stored.length - spec.Lq
    if new is not None and any(x is not None and x.is_neg() for x in new):
        new = new[0].resolve_neg(), None if new[1] is None else new[1].resolve_neg()
    return _stored.forward_stored(prepared, q, stored, start, _stored.operands_from(sink, offsets), new)


def _checked_offsets(offset: Tensor, B: int) -> Tensor:
    offset = offset.to(torch.int64).contiguous()
    if tuple(offset.shape) != (B,) or max(map(abs, offset.tolist()), default=0) > MAX_OFFSET:
        raise ValueError(f"offset: expected ({B},) positions between -2**48 and 2**48, got {offset}")
    return offset


def _problem(q: Tensor, stored: Stored, options: Options) -> Problem | None:
    """Builds the Problem of a call, with placeholders for k and v.

    Returns None for a call that needs k and v as tensors: a watched or differentiated call, or a
    call under autocast.
    """
    k, v, table = stored.k, stored.v, stored.table
    if not isinstance(q, Tensor) or q.ndim != 4 or in_autocast():
        return None
    dtype = k.dtype if stored.kind == "float" else q.dtype
    scalar = torch.empty((), dtype=dtype, device=k.device)
    sizes = (k.shape[0] if table is None else table.shape[0], k.shape[1], stored.length)
    problem = make(q, scalar.expand(*sizes, stored.D), scalar.expand(*sizes, stored.Dv), options)
    return None if problem.watched or problem.needs_grad or any_needs_grad(k, v) else problem


def _prepare(problem: Problem, stored: Stored, impl: str) -> _stored.StoredCall | None:
    """Prepares a call in which the native kernel reads the storage in place.

    Returns None if another backend runs the call, if it has too many query rows for the decode
    pass, or if q is float64 and the storage is quantised.
    """
    spec = problem.spec
    if choose(problem, impl) != "native" or (stored.kind != "float" and spec.dtype is torch.float64):
        return None
    return _stored.prepare_stored(spec, problem.q, stored)
