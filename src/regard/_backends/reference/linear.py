"""Linear attention, one token at a time, in float64. With a = exp(log_decay), each token computes

    S <- a S
    u = v, or u = beta (v - S^T k) with the delta rule
    S <- S + k u^T
    z <- a z + k

The output is scale q^T S, divided by scale q . z with normalize=True.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._call.linear import LinearCall, LinearResult


def linear(p: LinearCall) -> LinearResult:
    """Computes out (B, Hq, Lq, Dv) and the final state of each key head.

    The recurrence computes S and z separately for every query head.
    """
    group = max(1, p.q.shape[1] // max(1, p.k.shape[1]))
    q, k, v, S, z = _start(p, group)
    tokens = range(k.shape[2])
    if p.causal:
        rows = []
        for t in tokens:
            S, z = _step(p, t, k, v, S, z, group)
            rows.append(_read_state(p, q[:, :, t, None], S, z))
        out = torch.cat([*rows, v.new_empty(*q.shape[:2], 0, v.shape[3])], 2)
        out = torch.where(_is_real(p, q.shape[2])[:, None, :, None], out, 0.0)
    else:
        for t in tokens:
            S, z = _step(p, t, k, v, S, z, group)
        out = _read_state(p, q, S, z)
    S, z = S[:, ::group], z[:, ::group]
    return LinearResult(out.to(p.q.dtype), S.to(p.dtype), z.to(p.dtype) if p.normalize else None)


def _start(p: LinearCall, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v and the initial state (S, z) in float64, with Hq heads each."""
    q, k, v = p.q.double(), _per_head(p.k, group), _per_head(p.v, group)
    B, H, _, D = q.shape
    S = _per_head(p.S, group) if p.S is not None else q.new_zeros(B, H, D, v.shape[3])
    z = _per_head(p.z, group) if p.z is not None else q.new_zeros(B, H, D)
    return q, k, v, S, z


def _step(
    p: LinearCall, t: int, k: Tensor, v: Tensor, S: Tensor, z: Tensor, group: int
) -> tuple[Tensor, Tensor]:
    """Returns the state after token t. Padding tokens leave the state of their sample unchanged."""
    key, u = k[:, :, t], v[:, :, t]
    old_S, old_z = S, z
    if p.log_decay is not None:
        a = _per_head(p.log_decay, group)[:, :, t].exp()
        S, z = a[..., None, None] * S, a[..., None] * z
    if p.beta is not None:
        u = _per_head(p.beta, group)[:, :, t, None] * (u - (S * key[..., None]).sum(-2))
    S, z = S + key[..., None] * u[..., None, :], z + key
    real = _is_real(p, k.shape[2])[:, t, None]
    return torch.where(real[..., None, None], S, old_S), torch.where(real[..., None], z, old_z)


def _read_state(p: LinearCall, q: Tensor, S: Tensor, z: Tensor) -> Tensor:
    """Computes the outputs (B, H, n, Dv) of queries (B, H, n, D) from the state.

    With normalize=True, a query whose weights sum to 0 has an output of zeros.
    """
    out = p.scale * (q @ S)
    if not p.normalize:
        return out
    total = p.scale * (q * z[:, :, None]).sum(-1, keepdim=True)
    zero = total == 0
    return torch.where(zero, 0.0, out / torch.where(zero, 1.0, total))


def _is_real(p: LinearCall, L: int) -> Tensor:
    """Returns a bool tensor (B, L): True for real tokens, False for padding."""
    positions = torch.arange(L, device=p.q.device)
    lengths = positions.new_full((p.q.shape[0],), L) if p.lengths is None else p.lengths
    return positions < lengths[:, None]


def _per_head(x: Tensor, group: int) -> Tensor:
    """Repeats key heads for query heads: (B, Hkv, ...) -> (B, Hq, ...) in float64."""
    return x.double().repeat_interleave(group, 1)
