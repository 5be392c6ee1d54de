"""Attention over stored keys by the compiled core, and writes to their storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._call.spec import Spec
from ..._call.stored import GROUP, HALF, New, Stored
from ..._tools.arguments import describe
from ..._tools.memory_errors import raise_if_out_of_memory
from .attention import NO_OPERANDS, STORES, ZEROS, attention_of, empty_out, strides_agree
from .core import DTYPES, _core, address

CODES = {"int8": (torch.int8, GROUP), "int4": (torch.uint8, HALF)}  # dtype, elements per group


class StoredCall(NamedTuple):
    """A checked call over stored keys, reusable for any number of keys."""

    call: _core.Attention
    spec: Spec  # the Spec of the first call; later calls have another Lk and offset
    like_q: bool  # out has q's shape and strides
    capacity: int  # the largest number of keys per sample


def prepare_stored(spec: Spec, q: Tensor, stored: Stored) -> StoredCall | None:
    """Checks and prepares a call over stored keys.

    Returns None if the call has too many query rows for the decode pass. Then it is faster to
    gather the keys into a tensor first.
    """
    _check_stored(spec, stored)
    table = stored.table
    call = attention_of(spec, stored)
    if not call.decodes():
        return None
    capacity = stored.k.shape[2] if table is None else table.shape[1] * stored.page
    like_q = q.shape == spec.out_shape and strides_agree(torch.empty_like(q, device="meta"), spec)
    return StoredCall(call, spec, like_q, capacity)


def forward_stored(
    prepared: StoredCall, q: Tensor, stored: Stored, offset: int, operands: _core.Operands,
    new: New | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes out (B, Hq, Lq, Dv) and the LSE (B, Hq, Lq) or None.

    `operands` come from `operands_of` or `operands_from`. `new` holds k and v of one new token of
    each sample. If given, it is written as the last stored token before attention is computed.
    """
    call, spec, like_q, capacity = prepared
    k, v, k_scale, v_scale, table, _, _, length, _, _ = stored
    if not 0 <= length <= capacity:
        raise ValueError(f"stored.length: expected 0 to {capacity}, the capacity, got {length}")
    try:
        out = torch.empty_like(q) if like_q else empty_out(spec, q)
        lse = q.new_empty(spec.lse_shape, dtype=spec.lse_dtype) if spec.return_lse else None
        call.decode(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
            offset, length,
            k_scale=0 if k_scale is None else k_scale.data_ptr(),
            v_scale=0 if v_scale is None else v_scale.data_ptr(),
            table=0 if table is None else table.data_ptr(),
            table_stride=0 if table is None else table.stride(0), operands=operands,
            token=None if new is None else _token(*new),
        )  # fmt: skip
    except IndexError:
        raise ValueError(
            f"stored.table: expected page numbers from 0 to {k.shape[0] - 1} for all visible keys"
        ) from None
    except RuntimeError as error:
        raise_if_out_of_memory(error)
        raise
    return out, lse


def operands_from(sink: Tensor | None, offsets: Tensor | None) -> _core.Operands:
    """Returns the operands of a call that has no optional tensors except sink and offsets."""
    if sink is None and offsets is None:
        return NO_OPERANDS
    return _core.Operands(sink=address(sink), offsets=address(offsets))


def _token(k: Tensor, v: Tensor | None) -> _core.Token:
    """Describes one new token of each sample to the core.

    k and v are (B, H, 1, D), or (B, 1, D) if H = 1.
    """
    if v is None:
        return _core.Token(k=k.data_ptr(), k_stride=_strides(k), v=0, v_stride=ZEROS)
    return _core.Token(k=k.data_ptr(), k_stride=_strides(k), v=v.data_ptr(), v_stride=_strides(v))


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride() if x.ndim == 4 else (x.stride(0), *x.stride())


def write(stored: Stored, starts: Sequence[int], counts: Sequence[int], k: Tensor, v: Tensor | None) -> None:
    """Runs `stored.write(starts, counts, k, v)` in the core.

    The caller has checked shapes, dtypes and capacity.
    """
    table, sides = stored.table, [_side(k, stored.k, stored.k_scale, stored.D)]
    if v is not None:
        sides.append(_side(v, stored.v, stored.v_scale, stored.Dv))
    rows = _core.Write(
        dtype=DTYPES[k.dtype], store=STORES[stored.kind], B=k.shape[0], H=stored.k.shape[1],
        table=address(table), table_stride=0 if table is None else table.stride(0), page=stored.page,
        pages=stored.k.shape[0], sides=sides,
    )  # fmt: skip
    _core.write(rows, starts, counts)


def _side(x: Tensor, target: Tensor, scale: Tensor | None, width: int) -> _core.Side:
    return _core.Side(
        source=x.data_ptr(), source_stride=x.stride(),
        target=target.data_ptr(), target_stride=target.stride(), scales=address(scale),
        scale_stride=ZEROS if scale is None else (*scale.stride()[:3], 1), width=width,
    )  # fmt: skip


def _check_stored(spec: Spec, stored: Stored) -> None:
    """Checks that the stored tensors have shapes, dtypes and strides that the core supports."""
    k, v, k_scale, v_scale, table, page, kind, _, D, Dv = stored
    if kind not in STORES:
        raise ValueError(f"stored.kind: expected one of {', '.join(STORES)}, got {kind!r}")
    if table is not None and (table.dtype is not torch.int32 or table.ndim != 2 or table.stride(1) != 1):
        raise TypeError(f"stored.table: expected int32 (B, pages), contiguous rows, got {describe(table)}")
    if table is not None and (page < 16 or page & (page - 1)):
        raise ValueError(f"stored.page: expected a power of two, at least 16, got {page}")
    outer = (spec.B, 1) if table is None else (k.shape[0],)
    rows = k.shape[2] if table is None else page
    for name, x, scale, width in (("k", k, k_scale, D), ("v", v, v_scale, Dv)):
        dtype, size = (spec.dtype, width) if kind == "float" else _codes(kind, width)
        if (
            x.dtype is not dtype
            or x.ndim != 4
            or x.shape[0] not in outer
            or x.shape[1:] != (spec.Hkv, rows, size)
        ):
            expected = f"{dtype} ({outer[0]}, {spec.Hkv}, {rows}, {size})"
            raise ValueError(f"stored.{name}: expected {expected}, got {describe(x)}")
        if kind != "float":
            _check_codes(name, x, scale, -(-width // GROUP), kind)


def _codes(kind: str, width: int) -> tuple[torch.dtype, int]:
    """Returns the dtype of quantised codes, and how many of its elements hold `width` channels.

    `kind` is "int8" or "int4".
    """
    dtype, per_group = CODES[kind]
    return dtype, -(-width // GROUP) * per_group


def _check_codes(name: str, codes: Tensor, scale: Tensor | None, groups: int, kind: str) -> None:
    last_dims = (groups,) if kind == "int8" else (groups, 2)
    shape = (*codes.shape[:3], *last_dims)
    if scale is None or scale.dtype is not torch.float16 or scale.shape != shape:
        raise ValueError(f"stored.{name}_scale: expected float16 {shape}, got {describe(scale)}")
    if codes.stride(3) != 1 or not scale[0, 0, 0].is_contiguous():
        raise ValueError(f"stored.{name}: expected codes and scales with contiguous rows")
