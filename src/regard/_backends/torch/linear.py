"""Linear attention in chunks of tokens, for GPUs, torch.compile, torch.func and second derivatives.

S is the state before the chunk. Within a chunk, b is the cumulative sum of log_decay, and
G_ij = exp(b_i - b_j) for j <= i, else 0. `*` is elementwise; b and beta are columns. Without the
delta rule U = V; with it, U solves
    (I + tril(beta * G * (K K^T), -1)) U = beta * (V - exp(b) * (K S)).
With b_end the last entry of b, the output and the next state are
    O = scale (exp(b) * (Q S) + (G * (Q K^T)) U)  and
    S <- exp(b_end) S + (exp(b_end - b) * K)^T U.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._call.linear import LinearCall, LinearResult

CHUNK = 64


def linear(p: LinearCall) -> LinearResult:
    """Computes out and the final state of a call."""
    p = _without_padding(p)
    B, Hkv, _, D = p.k.shape
    S = p.S if p.S is not None else p.k.new_zeros(B, Hkv, D, p.v.shape[3], dtype=p.dtype)
    z = p.z if p.z is not None else p.k.new_zeros(B, Hkv, D, dtype=p.dtype)
    out, S, z = _causal(p, S, z) if p.causal else _full(p, S, z)
    return LinearResult(out.to(p.q.dtype), S, z if p.normalize else None)


def _without_padding(p: LinearCall) -> LinearCall:
    """Sets k, v, log_decay and beta of padding to 0, so that padding leaves the state unchanged.

    In a causal call also sets q of padding to 0, so that its output rows are zeros.
    """
    if p.lengths is None:
        return p
    real = (torch.arange(p.k.shape[2], device=p.k.device) < p.lengths[:, None])[:, None]  # (B, 1, L)
    k, v = torch.where(real[..., None], p.k, 0), torch.where(real[..., None], p.v, 0)
    q = torch.where(real[..., None], p.q, 0) if p.causal else p.q
    decay = None if p.log_decay is None else torch.where(real, p.log_decay, 0)
    return p._replace(
        q=q, k=k, v=v, log_decay=decay, beta=None if p.beta is None else torch.where(real, p.beta, 0)
    )


def _full(p: LinearCall, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, S and z of a non-causal call: every query attends to every key."""
    k, v = p.k.to(p.dtype), p.v.to(p.dtype)
    S, z = S + k.mT @ v, z + k.sum(2)
    q = _grouped(p.q, k.shape[1]).to(p.dtype) * p.scale
    out, total = q @ S[:, :, None], q @ z[:, :, None, :, None]
    return _divided(out, total, p.normalize).flatten(1, 2), S, z


class _Chunks(NamedTuple):
    """The tokens of a call in n chunks of C tokens, (B, Hkv, n, C, ...), in the compute dtype.

    Within a chunk, b is the cumulative sum of log_decay, and G_ij = exp(b_i - b_j) for j <= i,
    else 0.
    """

    q: Tensor  # (B, Hkv, group, n, C, D), times scale; group = Hq / Hkv
    k: Tensor
    v: Tensor
    beta: Tensor | None  # (B, Hkv, n, C, 1)
    pairs: Tensor  # G, (B, Hkv, n, C, C), or (C, C) without decay
    since: Tensor | None  # exp(b), (B, Hkv, n, C, 1); None without decay
    until: Tensor | None  # exp(b_end - b), (B, Hkv, n, C, 1); None without decay


def _causal(p: LinearCall, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, S and z of a causal call, computed chunk by chunk."""
    L, C = p.k.shape[2], min(CHUNK, max(p.k.shape[2], 1))
    chunks = _split(p, C)
    scores = (chunks.q @ chunks.k.mT[:, :, None]) * _per_group(chunks.pairs)
    inverse = _inverse(chunks)
    rows, totals = [], []
    for i in range(math.ceil(L / C)):
        k, u = chunks.k[:, :, i], chunks.v[:, :, i]
        q = chunks.q[:, :, :, i]
        since, end = _at(chunks.since, i), 1.0 if chunks.since is None else chunks.since[:, :, i, -1:]
        if chunks.beta is not None and inverse is not None:
            u = inverse[:, :, i] @ (chunks.beta[:, :, i] * (u - since * (k @ S)))
        from_state = since if isinstance(since, float) else since[:, :, None]
        rows.append(from_state * (q @ S[:, :, None]) + scores[:, :, :, i] @ u[:, :, None])
        if p.normalize:
            total = from_state * (q @ z[:, :, None, :, None])
            totals.append(total + scores[:, :, :, i].sum(-1, keepdim=True))
        decayed = k * _at(chunks.until, i)
        S, z = end * S + decayed.mT @ u, (end if isinstance(end, float) else end[..., 0]) * z + decayed.sum(2)
    if not rows:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[3], dtype=p.dtype), S, z
    out = torch.stack(rows, 3)
    out = _divided(out, torch.stack(totals, 3) if totals else out, p.normalize)
    return out.flatten(3, 4)[:, :, :, :L].flatten(1, 2), S, z


def _split(p: LinearCall, C: int) -> _Chunks:
    """Splits the tokens into chunks.

    The last chunk is padded with tokens of zeros, which leave the state unchanged.
    """
    L = p.k.shape[2]
    padding = -L % C

    def chunked(x: Tensor) -> Tensor:
        padded = F.pad(x.to(p.dtype), (0, 0, 0, padding))
        return padded.reshape(*x.shape[:-2], (L + padding) // C, C, x.shape[-1])

    lower = torch.ones(C, C, dtype=torch.bool, device=p.k.device).tril()
    q = chunked(_grouped(p.q, p.k.shape[1]) * p.scale)
    beta = None if p.beta is None else chunked(p.beta[..., None])
    if p.log_decay is None:
        return _Chunks(q, chunked(p.k), chunked(p.v), beta, lower.to(p.dtype), None, None)
    b = chunked(p.log_decay[..., None]).cumsum(-2)
    pairs = torch.where(lower, b - b.mT, -math.inf).exp()
    return _Chunks(q, chunked(p.k), chunked(p.v), beta, pairs, b.exp(), (b[..., -1:, :] - b).exp())


def _inverse(chunks: _Chunks) -> Tensor | None:
    """Computes (I + tril(beta * G * (K K^T), -1))^-1 of each chunk, (B, Hkv, n, C, C).

    `*` is elementwise. G is defined at the top of the file. Returns None without beta.
    """
    if chunks.beta is None:
        return None
    k = chunks.k
    below = (chunks.beta * (k @ k.mT) * chunks.pairs).tril(-1)
    eye = torch.eye(below.shape[-1], dtype=below.dtype, device=below.device)
    inverse: Tensor = torch.linalg.solve_triangular(
        eye + below, eye.expand_as(below), upper=False, unitriangular=True
    )
    return inverse


def _divided(out: Tensor, total: Tensor, normalize: bool) -> Tensor:
    """Divides out by `total`, the sums of the weights, if `normalize`.

    Rows whose weights sum to 0 become zeros.
    """
    if not normalize:
        return out
    zero = total == 0
    return torch.where(zero, 0.0, out / torch.where(zero, 1.0, total))


def _grouped(q: Tensor, Hkv: int) -> Tensor:
    """Groups query heads by key head: (B, Hq, L, D) -> (B, Hkv, group, L, D)."""
    B, Hq, L, D = q.shape
    return q.reshape(B, Hkv, Hq // max(Hkv, 1), L, D)


def _per_group(pairs: Tensor) -> Tensor:
    """Inserts a dim for the query heads of a key head: (B, Hkv, ...) -> (B, Hkv, 1, ...)."""
    return pairs if pairs.ndim == 2 else pairs[:, :, None]


def _at(x: Tensor | None, i: int) -> Tensor | float:
    """Returns chunk i of the factor x, or 1 if x is None."""
    return 1.0 if x is None else x[:, :, i]
