"""Linear attention by the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._call.linear import SEGMENT, LinearCall, LinearResult
from ..._call.spec import QKV
from ..._tools.memory_errors import memory_errors
from .core import DTYPES, _core, address


class LinearSaved(NamedTuple):
    """The tensors that backward needs besides the inputs."""

    S: Tensor | None  # (B, Hkv, segments, D, Dv): the state before every 512th token
    z: Tensor | None  # (B, Hkv, segments, D): the sum of the keys before every 512th token
    errors: Tensor | None  # (B, Hkv, L, Dv): v - S^T k, which the delta rule computes


NOTHING_SAVED = LinearSaved(None, None, None)


@memory_errors
def linear(p: LinearCall, out: Tensor | None = None) -> LinearResult:
    """Computes out, written to `out` if that is given, and the final state of a call."""
    return _forward(p, NOTHING_SAVED, out)


@memory_errors
def linear_saving(p: LinearCall, out: Tensor | None = None) -> tuple[LinearResult, LinearSaved]:
    """Runs the forward pass. Returns its result and the tensors that backward needs.

    The output is written to `out`, if it is given.
    """
    spec = p.spec
    S, z = _empty_state(p, -(-spec.Lk // SEGMENT))
    errors = (
        p.k.new_empty((spec.B, spec.Hkv, spec.Lk, spec.Dv), dtype=p.dtype) if p.beta is not None else None
    )
    saved = LinearSaved(S, z, errors)
    return _forward(p, saved, out), saved


def _forward(p: LinearCall, saved: LinearSaved, out: Tensor | None = None) -> LinearResult:
    spec = p.spec
    if out is None:
        out = p.q.new_empty_strided((spec.B, spec.Hq, spec.Lq, spec.Dv), spec.out_stride)
    S, z = _empty_state(p)
    call, keepalive = _call(p, saved, out.data_ptr(), S.data_ptr(), address(z))
    _core.linear_forward(_spec(p, out.stride()), call)
    del keepalive
    return LinearResult(out, S, z)


@memory_errors
def linear_backward(
    p: LinearCall, saved: LinearSaved, dout: Tensor, dS: Tensor | None, dz: Tensor | None,
    into: QKV | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Computes the gradients of q, k, v, log_decay, beta and the initial state (S, z).

    The gradient of an input that is None is None. Those of q, k and v are written to `into`, if it
    is given.
    """
    dout = dout if dout.dtype is p.q.dtype else dout.to(p.q.dtype)
    dS, dz = (x if x is None else x.to(p.dtype).contiguous() for x in (dS, dz))
    dq, dk, dv = into or (torch.empty_like(x, memory_format=torch.contiguous_format) for x in p[:3])
    gates = [None if x is None else x.new_empty(x.shape) for x in (p.log_decay, p.beta)]
    S, z = _empty_state(p)
    call, keepalive = _call(p, saved)
    gradients = _core.LinearGradients(
        dout=dout.data_ptr(), dout_stride=dout.stride(), dS_end=address(dS), dz_end=address(dz),
        dq=dq.data_ptr(), dq_stride=dq.stride(), dk=dk.data_ptr(), dk_stride=dk.stride(), dv=dv.data_ptr(),
        dv_stride=dv.stride(), dlog_decay=address(gates[0]), dbeta=address(gates[1]), dS=S.data_ptr(),
        dz=address(z),
    )  # fmt: skip
    _core.linear_backward(_spec(p, p.out_stride), call, gradients)
    del keepalive
    return dq, dk, dv, *gates, S if p.S is not None else None, z if p.z is not None else None


def _call(
    p: LinearCall, saved: LinearSaved, out: int = 0, S_end: int = 0, z_end: int = 0
) -> tuple[_core.LinearCall, tuple[Tensor | None, ...]]:
    """Returns the core's call object, and tensors that must stay alive until the call ends."""
    optional = (p.log_decay, p.beta, p.lengths, p.S, p.z)
    keepalive = tuple(None if x is None else x.contiguous() for x in optional)
    log_decay, beta, lengths, S, z = map(address, keepalive)
    call = _core.LinearCall(
        q=p.q.data_ptr(), k=p.k.data_ptr(), v=p.v.data_ptr(), out=out, log_decay=log_decay, beta=beta,
        lengths=lengths, S=S, z=z, S_end=S_end, z_end=z_end, S_kept=address(saved.S), z_kept=address(saved.z),
        errors=address(saved.errors),
    )  # fmt: skip
    return call, keepalive


def _empty_state(p: LinearCall, *segments: int) -> tuple[Tensor, Tensor | None]:
    """Allocates S (B, Hkv, *segments, D, Dv) and, with normalize=True, z (B, Hkv, *segments, D).

    `segments` is empty for one state, or the number of states to save for each key head.
    """
    spec, outer = p.spec, (p.spec.B, p.spec.Hkv, *segments)
    S = p.k.new_empty((*outer, spec.D, spec.Dv), dtype=p.dtype)
    return S, p.k.new_empty((*outer, spec.D), dtype=p.dtype) if p.normalize else None


def _spec(p: LinearCall, out_stride: Sequence[int]) -> _core.LinearSpec:
    spec = p.spec
    return _core.LinearSpec(
        dtype=DTYPES[spec.dtype], B=spec.B, Hq=spec.Hq, Hkv=spec.Hkv, L=spec.Lq, D=spec.D, Dv=spec.Dv,
        q=p.q.stride(), k=p.k.stride(), v=p.v.stride(), out=out_stride, scale=spec.scale,
        normalize=p.normalize,
    )  # fmt: skip
