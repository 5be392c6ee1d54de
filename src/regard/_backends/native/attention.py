"""Attention by the compiled core: allocates the results and passes addresses, sizes and strides.

The core receives no tensor objects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._call.spec import Problem, Spec
from ..._call.stored import Stored
from ..._tools.memory_errors import memory_errors, raise_if_out_of_memory
from . import core
from .core import DTYPES, _core, address

BIASES = {"none": 0, "tensor": 1, "alibi": 2, "relative": 3}  # types.h: BiasKind
STORES = {"float": 0, "int8": 1, "int4": 2}  # types.h: StoreKind
NO_OPERANDS: _core.Operands = _core.Operands() if _core is not None else None
ZEROS = (0, 0, 0, 0)


def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns why the native backend cannot run the problem, or () if it can."""
    device = problem.spec.device.type
    if device != "cpu":
        return (f"native kernels run on the CPU, the tensors are on {device}",)
    return ()


def forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Computes out (..., Hq, Lq, Dv) and the LSE (..., Hq, Lq) or None.

    out has q's dtype and memory order.
    """
    spec, q, k, v = problem[:4]
    call, like_q, operands = spec.memo.get("native") or prepare(spec, q)
    try:
        out = torch.empty_like(q) if like_q else empty_out(spec, q)
        lse = q.new_empty(spec.lse_shape, dtype=spec.lse_dtype) if spec.return_lse else None
    except RuntimeError as error:
        raise_if_out_of_memory(error)
        raise
    if type(out) is not Tensor and isinstance(out, FakeTensor):
        return _restore_batch(out, spec), lse
    lse_address = lse.data_ptr() if lse is not None else 0
    keepalive = None
    if operands is None:
        operands, keepalive = operands_of(problem)
    call.forward(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address, 0, 0, spec.offset or 0,
        operands,
    )  # fmt: skip
    del keepalive
    return out if spec.rank == 4 else _restore_batch(out, spec), lse  # skips a function call at rank 4


class Saved(NamedTuple):
    """The results of a forward pass and the other tensors that backward needs.

    Backward computes the weights from the stats, each row's shift and softmax sum, because the
    shift is an integer and thus exact. Weights computed from the LSE would be less precise: at
    scores of -1e4, a float32 LSE is off by 5e-4, and so is each weight (relative error). The
    residual keeps the rounding error of a 16-bit output out of the gradients.
    """

    out: Tensor  # (B, Hq, Lq, Dv)
    lse: Tensor | None
    stats: Tensor  # (2, B, Hq, Lq): each row's shift, an integer exponent of 2, and its softmax sum
    residual: Tensor | None  # like out, for 16-bit dtypes: the rounding error of out


@memory_errors
def forward_saving(problem: Problem) -> Saved:
    """Runs the forward pass of a canonical problem and returns the tensors that backward needs."""
    spec, q, k, v = problem[:4]
    call, like_q, operands = spec.memo.get("native") or prepare(spec, q)
    out = torch.empty_like(q) if like_q else empty_out(spec, q)
    lse = q.new_empty(spec.lse_shape, dtype=spec.lse_dtype) if spec.return_lse else None
    stats = q.new_empty((2, spec.B, spec.Hq, spec.Lq), dtype=spec.lse_dtype)
    residual = torch.empty_like(out) if spec.dtype.itemsize == 2 else None
    if type(out) is not Tensor and isinstance(out, FakeTensor):
        return Saved(out, lse, stats, residual)
    keepalive = None
    if operands is None:
        operands, keepalive = operands_of(problem)
    call.forward(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), address(lse), stats.data_ptr(),
        address(residual), spec.offset or 0, operands,
    )  # fmt: skip
    del keepalive
    return Saved(out, lse, stats, residual)


class Gradients(NamedTuple):
    """Gradients of the canonical inputs. None for a gradient that is not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None  # (1 or B, 1 or Hq, 1 or Lq, 1 or Lk)
    by_head: Tensor | None  # of ALiBi slopes (Hq,), or of a relative bias (Hq, 2 * far + 1)
    sink: Tensor | None  # (Hq,)


@memory_errors
def backward(
    problem: Problem, out: Tensor, stats: Tensor, residual: Tensor | None, dout: Tensor, dlse: Tensor | None,
    wanted: tuple[bool, bool, bool, bool, bool, bool],
) -> Gradients:  # fmt: skip
    """Computes gradients, given dout and dlse. `wanted` has a flag for each field of `Gradients`.

    The gradients of q, k and v have q's dtype.
    """
    spec, q, k, v = problem[:4]
    grads = _empty_gradients(problem, wanted)
    dout = dout if dout.dtype is spec.dtype else dout.to(spec.dtype)
    dlse = dlse.to(spec.lse_dtype).contiguous() if dlse is not None else None
    call, _, operands = spec.memo.get("native") or prepare(spec, q)
    keepalive = None
    if operands is None:
        operands, keepalive = operands_of(problem)
    gradients = _core.Gradients(
        out=out.data_ptr(), residual=address(residual), dout=dout.data_ptr(), dout_stride=dout.stride(),
        dlse=address(dlse), stats=stats.data_ptr(), dq=address(grads.q), dk=address(grads.k),
        dk_stride=_strides(grads.k), dv=address(grads.v), dv_stride=_strides(grads.v),
        dbias=address(grads.bias), dbias_stride=_broadcast_strides(grads.bias),
        dby_head=address(grads.by_head), dsink=address(grads.sink),
    )  # fmt: skip
    call.backward(q.data_ptr(), k.data_ptr(), v.data_ptr(), spec.offset or 0, operands, gradients)
    del keepalive
    return grads if grads.bias is None else grads._replace(bias=grads.bias.to(spec.bias_dtype))


def _empty_gradients(problem: Problem, wanted: tuple[bool, ...]) -> Gradients:
    """Allocates the gradients. `wanted` has a flag for each field of `Gradients`."""
    spec, q, k, v = problem[:4]
    empty = spec.B * spec.Hq * spec.Lq * spec.Lk == 0
    like = torch.zeros_like if empty else torch.empty_like
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if wanted[0] else None
    dk, dv = like(k) if wanted[1] else None, like(v) if wanted[2] else None
    if True not in wanted[3:]:
        return Gradients(dq, dk, dv, None, None, None)
    return Gradients(
        dq, dk, dv, _empty_bias(problem) if wanted[3] else None,
        torch.zeros_like(problem.by_head) if wanted[4] and problem.by_head is not None else None,
        q.new_zeros(spec.Hq, dtype=spec.lse_dtype) if wanted[5] else None,
    )  # fmt: skip


def _empty_bias(problem: Problem) -> Tensor | None:
    """Allocates the gradient of a bias tensor.

    If the bias broadcasts over queries or keys, its gradient is a sum and has dtype float64.
    Otherwise the gradient has the bias's dtype if that has 16 bits, else the dtype of the LSE.
    """
    spec, bias = problem.spec, problem.bias
    if not isinstance(bias, Tensor):
        return None
    full_size = bias.shape[-2] == spec.Lq and bias.shape[-1] == spec.Lk
    dtype = torch.float64 if not full_size else bias.dtype if bias.dtype.itemsize == 2 else spec.lse_dtype
    empty = spec.B * spec.Hq * spec.Lq * spec.Lk == 0
    return (torch.zeros if empty else torch.empty)(bias.shape, dtype=dtype, device=bias.device)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return x.stride() if x is not None else ZEROS


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Returns the strides of x with 0 in dims of size 1."""
    if x is None:
        return ZEROS
    return tuple(s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True))


def prepare(spec: Spec, q: Tensor) -> tuple[_core.Attention, bool, _core.Operands | None]:
    """Returns the core's call object, whether out has q's shape and strides, and the operands.

    The operands are None if they must be built from the tensors of each call, otherwise they are
    empty. The results are cached in the Spec.
    """
    like_q = spec.rank == 4 and q.shape == spec.out_shape
    like_q = like_q and strides_agree(torch.empty_like(q, device="meta"), spec)
    prepared = spec.memo["native"] = (attention_of(spec), like_q, None if spec.has_operands else NO_OPERANDS)
    return prepared


def strides_agree(x: Tensor, spec: Spec) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), spec.out_stride, strict=True))


def empty_out(spec: Spec, q: Tensor) -> Tensor:
    return q.new_empty_strided((spec.B, spec.Hq, spec.Lq, spec.Dv), spec.out_stride)


def _restore_batch(out: Tensor, spec: Spec) -> Tensor:
    """Restores the caller's leading dims: (B, Hq, Lq, Dv) -> (..., Hq, Lq, Dv)."""
    if spec.rank == 4:
        return out
    if spec.rank == 2:
        return out[0, 0]
    return out[0] if spec.rank == 3 else out.unflatten(0, spec.batch)


def attention_of(spec: Spec, stored: Stored | None = None) -> _core.Attention:
    """Returns the core's call object. With `stored`, k and v are read from a cache's storage."""
    storage: dict[str, Any] = (
        {"k": spec.k_stride, "v": spec.v_stride} if stored is None else _stored_fields(stored)
    )
    core_spec = _core.Spec(
        dtype=DTYPES[spec.dtype], bias_dtype=DTYPES[spec.bias_dtype] if spec.bias_dtype is not None else 0,
        bias=BIASES[spec.bias], B=spec.B, Hq=spec.Hq, Hkv=spec.Hkv, Lq=spec.Lq, Lk=spec.Lk, D=spec.D,
        Dv=spec.Dv, q=spec.q_stride, out=spec.out_stride, bias_stride=spec.bias_stride, scale=spec.scale,
        softcap=spec.softcap or 0.0, drop_below=round(spec.dropout * 65536),
        keep_scale=1 / (1 - spec.dropout) if spec.dropout < 1 else 0.0, **storage,
    )  # fmt: skip
    return _core.Attention(core_spec, spec.code)


def _stored_fields(stored: Stored) -> dict[str, Any]:
    """Returns the fields of the core's Spec that describe the storage of keys and values."""
    k, v, k_scale, v_scale, table, page, kind, *_ = stored
    strides = {name: (*_outer(x), x.stride(3)) for name, x in (("k", k), ("v", v))}
    scales = {
        name: (*_outer(x), 1) for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None
    }
    paged = {} if table is None else {"page": page, "pages": k.shape[0]}
    return {"store": STORES[kind], **strides, **scales, **paged}


def _outer(x: Tensor) -> tuple[int, int, int]:
    """Returns the strides of x along samples (or pages), heads and rows."""
    return (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2))


def operands_of(problem: Problem) -> tuple[_core.Operands, tuple[Tensor | None, ...]]:
    """Returns the operands of a call: the seed and the addresses of all optional tensors.

    Also returns the tensors that must stay alive until the call ends.
    """
    spec, bias = problem.spec, problem.bias
    by_head, low, count = _by_head(problem)
    sink = problem.sink.detach().to(spec.lse_dtype).contiguous() if problem.sink is not None else None
    offsets = problem.offset.contiguous() if problem.offset is not None else None
    operands = _core.Operands(
        bias=bias.data_ptr() if isinstance(bias, Tensor) else 0, by_head=address(by_head), distance_low=low,
        distances=count, sink=address(sink), offsets=address(offsets), seed=problem.seed,
        origin=problem.origin, tensors=_mask_tensors(problem),
    )  # fmt: skip
    return operands, (by_head, sink, offsets)


def _by_head(problem: Problem) -> tuple[Tensor | None, int, int]:
    """Returns by_head, its first distance and its number of distances.

    by_head is None, the ALiBi slopes (Hq,) or a relative bias (Hq, distances). The two numbers are
    0 unless it is a relative bias.
    """
    table = problem.by_head
    if table is None:
        return None, 0, 0
    table = table.detach()
    return (table, 0, 0) if table.ndim == 1 else (table, -(table.shape[1] // 2), table.shape[1])


def _mask_tensors(problem: Problem) -> list[_core.MaskTensor]:
    """Describes the mask program's tensors: sizes and strides for sample, head, query and key.

    Strides are 0 in broadcast dims.
    """
    mask_tensors = []
    for x in problem.tensors:
        missing = 4 - x.ndim
        sizes = (x.shape[0], *(1,) * missing, *x.shape[1:])
        strides = (x.stride(0), *(0,) * missing, *x.stride()[1:])
        strides = tuple(s if n > 1 else 0 for n, s in zip(sizes, strides, strict=True))
        mask_tensors.append(_core.MaskTensor(data=x.data_ptr(), size=sizes, stride=strides))
    return mask_tensors


class Cost(NamedTuple):
    """The work of a forward pass, counted from the spans of the mask."""

    pairs: int  # (query, key) pairs that the mask allows, over all samples and heads
    touched: int  # pairs computed
    full: int  # (panel, key) pairs in which every row of the panel may attend to the key
    partial: int  # (panel, key) pairs in which some rows of the panel may
    empty: int  # (panel, key) pairs in which no row of the panel may
    tasks: int
    scratch_bytes: int  # scratch memory of all threads
    threads: int


def cost(problem: Problem) -> Cost:
    """Counts the work of a call without running it."""
    operands, keepalive = _mask_operands(problem)
    cost = Cost(**attention_of(problem.spec).cost(problem.spec.offset or 0, operands))
    del keepalive
    return cost


def decodes(problem: Problem) -> bool:
    """Returns whether the call has so few query rows that the core's decode pass runs it."""
    return attention_of(problem.spec).decodes()


def products(problem: Problem) -> str:
    """Returns how the core multiplies numbers: "float32", "float64" or "pairs of bfloat16".

    For a bfloat16 call in float32, the text also says why.
    """
    dtype = problem.spec.dtype
    if dtype != torch.bfloat16:
        return core.products(dtype)
    if decodes(problem):
        return "float32 (few query rows)"
    text = core.products(dtype)
    return text if text != "float32" else f"float32 (no {core.PAIRS}: {core.why_no_pairs()})"


def spans(
    problem: Problem, batch: int, head: int, row: int, count: int, step: int = 1
) -> list[tuple[int, int, int]]:
    """Returns the key spans of `count` query rows: row, row + step, ...

    A span (begin, end, rows) is a range of keys and the bit set of the rows that may attend to it.
    """
    operands, keepalive = _mask_operands(problem)
    result = attention_of(problem.spec).spans(
        batch, head, row, step, count, problem.spec.offset or 0, operands
    )
    del keepalive
    return result


def _mask_operands(problem: Problem) -> tuple[_core.Operands, Tensor | None]:
    """Returns operands that hold only offsets and mask tensors.

    Also returns the tensor of offsets, which must stay alive until the call ends, or None.
    """
    offsets = problem.offset.contiguous() if problem.offset is not None else None
    return _core.Operands(offsets=address(offsets), tensors=_mask_tensors(problem)), offsets
