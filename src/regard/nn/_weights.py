"""Attention that also gives the n x n weights, for `MultiheadAttention` when it is asked for them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from .._api.attention import attention
from .._call.spec import QKV
from .._tools.arguments import readable
from .._tools.listeners import listeners
from .._tools.watching import is_watched
from ..masks import Arguments

PIECE = 2**18  # scores in a tile: they fit into a core's cache
EXACT = (torch.float32, torch.float64)


class Given(NamedTuple):
    """A bias and a mask of hidden keys, broadcastable to (B, H, Lq, Lk)."""

    bias: Tensor | None
    hidden: Tensor | None
    blind: Tensor | None  # (..., Lq, 1): rows that see nothing


def attend_with_weights(
    qkv: QKV, arguments: Arguments, dropout: float, average: bool
) -> tuple[Tensor, Tensor]:
    """Returns the result (B, H, Lq, D) and the weights before dropout: (B, Lq, Lk), or (B, H, Lq, Lk).

    A row that sees nothing is zeros. Without gradients and dropout the result is made of the weights, so that
    scores are computed once; if a hidden value is not finite it would show, and the kernel is asked instead.
    """
    q, k, v = qkv
    given = _given(q, k, arguments)
    if dropout or listeners or not _is_plain(qkv, given):
        w = _formula(q, k, given)
        out = attention(q, k, v, dropout=dropout, **arguments._asdict())
        return out, w.mean(1) if average else w
    out, w = _at_once(qkv, given, average)
    if given.hidden is not None and not bool(out.isfinite().all()):
        out = attention(q, k, v, **arguments._asdict())
    return out, w


def dense_weights(q: Tensor, k: Tensor, arguments: Arguments) -> Tensor:
    """Returns the weights (B, H, Lq, Lk) of q (B, H, Lq, D) and k (B, H, Lk, D)."""
    return _formula(q, k, _given(q, k, arguments))


def _given(q: Tensor, k: Tensor, arguments: Arguments) -> Given:
    hidden, bias = None, arguments.bias
    if arguments.mask is not None:
        hidden = ~arguments.mask.to_dense(q.shape[2], k.shape[2], arguments.offset, q.shape[1], q.device)
    if bias is not None:
        excluded = _if_any(bias == -torch.inf)  # selected, not added: the score may be NaN
        hidden = hidden if excluded is None else excluded if hidden is None else hidden | excluded
    return Given(bias, hidden, None if hidden is None else _if_any(hidden.all(-1, keepdim=True)))


def _if_any(x: Tensor) -> Tensor | None:
    """Returns a bool tensor, or None if it is known to be False everywhere."""
    return x if not readable(x) or bool(x.any()) else None


def _is_plain(qkv: QKV, given: Given) -> bool:
    """Returns whether no gradient and no transform needs the steps, so that they may work in place."""
    leaves = qkv if given.bias is None else (*qkv, given.bias)
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    return not followed and not is_watched(*qkv) and qkv[0].dtype in EXACT


def _formula(q: Tensor, k: Tensor, given: Given) -> Tensor:
    """Computes the weights out of place, in float32 for 16-bit inputs, and returns them in q's dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s: Tensor = (q.to(wide) * q.shape[-1] ** -0.5) @ k.to(wide).mT
    if given.bias is not None:
        s = s + given.bias
    if given.hidden is not None:
        s = s.masked_fill(given.hidden, -torch.inf)
    w = s.softmax(-1)
    return (w if given.blind is None else w.masked_fill(given.blind, 0)).to(q.dtype)


def _at_once(qkv: QKV, given: Given, average: bool) -> tuple[Tensor, Tensor]:
    """Computes result and weights tile by tile in one buffer.

    Allocating memory for all scores would take as long as computing them.
    """
    q, k, v = qkv
    (B, H, Lq, _), Lk = q.shape, k.shape[2]
    if B * H * Lq * Lk <= PIECE:
        w = _formula(q, k, given)
        return w @ v, w.mean(1) if average else w
    out, scaled = torch.empty_like(q), q * q.shape[-1] ** -0.5
    found = q.new_zeros(B, Lq, Lk) if average else q.new_empty(B, H, Lq, Lk)
    given = Given(*(None if x is None else x.expand(B, H, Lq, x.shape[-1]) for x in given))
    samples, heads = _piece(H, Lq * Lk)
    room = q.new_empty(2, min(samples, B), heads, Lq, Lk)
    for b, h in itertools.product(range(0, B, samples), range(0, H, heads)):
        at = slice(b, b + samples), slice(h, h + heads)
        n, m = q[at].shape[:2]
        s, w = room[:, :n, :m]
        w = w if average else found[at]
        torch.bmm(scaled[at].flatten(0, 1), k[at].flatten(0, 1).mT, out=s.flatten(0, 1))
        _softmax(s, Given(*(None if x is None else x[at] for x in given)), w)
        out[at] = torch.bmm(w.flatten(0, 1), v[at].flatten(0, 1)).unflatten(0, (n, m))
        if average:
            found[at[0]] += w.sum(1) if m > 1 else w[:, 0]
    return out, found.div_(H) if average else found


def _softmax(s: Tensor, given: Given, w: Tensor) -> None:
    """Writes the softmax of scores (n, m, Lq, Lk) into w. Overwrites the scores."""
    if given.bias is not None:
        s += given.bias
    if given.hidden is not None:
        s.masked_fill_(given.hidden, -torch.inf)
    torch.softmax(s, -1, out=w)
    if given.blind is not None:
        w.masked_fill_(given.blind, 0)


def _piece(H: int, pairs: int) -> tuple[int, int]:
    """Returns the samples and heads of a tile: several samples with all heads, or some heads of one."""
    fitting = PIECE // max(1, pairs)
    return max(1, fitting // H), max(1, min(H, fitting))
