"""Attention that also returns its weights, for `MultiheadAttention` with `need_weights`."""

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

TILE_SCORES = 2**18  # scores in a tile; a tile fits into the cache of a CPU core
FULL_PRECISION = (torch.float32, torch.float64)


class DenseOptions(NamedTuple):
    """Bias and masks as tensors, broadcastable to (B, H, Lq, Lk)."""

    bias: Tensor | None
    masked: Tensor | None  # True = may not attend
    fully_masked: Tensor | None  # (..., Lq, 1): rows without an allowed key


def attend_with_weights(
    qkv: QKV, arguments: Arguments, dropout: float, average: bool
) -> tuple[Tensor, Tensor]:
    """Returns the output (B, H, Lq, D) and the weights before dropout.

    The weights are (B, Lq, Lk) if `average`, else (B, H, Lq, Lk). Fully masked rows are zero.

    In float32 and float64, without gradients and dropout, the output is the product of weights and
    values, so that scores are computed once. If there is a mask and that product is not finite,
    `regard.attention` computes the output instead. The cause may be a NaN in a masked value:
    0 * NaN is NaN, and `regard.attention` skips masked keys.
    """
    q, k, v = qkv
    options = _dense_options(q, k, arguments)
    if dropout or listeners or not _may_work_in_place(qkv, options):
        w = _softmax_weights(q, k, options)
        out = attention(q, k, v, dropout=dropout, **arguments._asdict())
        return out, w.mean(1) if average else w
    out, w = _tiled(qkv, options, average)
    if options.masked is not None and not bool(out.isfinite().all()):
        out = attention(q, k, v, **arguments._asdict())
    return out, w


def dense_weights(q: Tensor, k: Tensor, arguments: Arguments) -> Tensor:
    """Returns the weights (B, H, Lq, Lk) of q (B, H, Lq, D) and k (B, H, Lk, D)."""
    return _softmax_weights(q, k, _dense_options(q, k, arguments))


def _dense_options(q: Tensor, k: Tensor, arguments: Arguments) -> DenseOptions:
    masked, bias = None, arguments.bias
    if arguments.mask is not None:
        masked = ~arguments.mask.to_dense(q.shape[2], k.shape[2], arguments.offset, q.shape[1], q.device)
    if bias is not None:
        excluded = _if_any(bias == -torch.inf)  # masked explicitly: a NaN score + -inf is NaN
        masked = masked if excluded is None else excluded if masked is None else masked | excluded
    return DenseOptions(bias, masked, None if masked is None else _if_any(masked.all(-1, keepdim=True)))


def _if_any(x: Tensor) -> Tensor | None:
    """Returns the bool tensor x, or None if x is known to be False everywhere."""
    return x if not readable(x) or bool(x.any()) else None


def _may_work_in_place(qkv: QKV, options: DenseOptions) -> bool:
    """Returns whether scores and weights may be computed in buffers that are overwritten.

    This requires that no gradient is recorded, that PyTorch does not compile, trace or transform
    the call, and that q is float32 or float64.
    """
    leaves = qkv if options.bias is None else (*qkv, options.bias)
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    return not has_gradient and not is_watched(*qkv) and qkv[0].dtype in FULL_PRECISION


def _softmax_weights(q: Tensor, k: Tensor, options: DenseOptions) -> Tensor:
    """Returns the weights (B, H, Lq, Lk) in q's dtype, computed out of place.

    16-bit inputs are converted to float32 for the computation.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    s: Tensor = (q.to(wide) * q.shape[-1] ** -0.5) @ k.to(wide).mT
    if options.bias is not None:
        s = s + options.bias
    if options.masked is not None:
        s = s.masked_fill(options.masked, -torch.inf)
    w = s.softmax(-1)
    return (w if options.fully_masked is None else w.masked_fill(options.fully_masked, 0)).to(q.dtype)


def _tiled(qkv: QKV, options: DenseOptions, average: bool) -> tuple[Tensor, Tensor]:
    """Returns the output and the weights, as `attend_with_weights` does, computed tile by tile.

    All tiles share one buffer of scores, because allocating memory for all scores would take as
    long as computing them.
    """
    q, k, v = qkv
    (B, H, Lq, _), Lk = q.shape, k.shape[2]
    if B * H * Lq * Lk <= TILE_SCORES:
        w = _softmax_weights(q, k, options)
        return w @ v, w.mean(1) if average else w
    out, scaled = torch.empty_like(q), q * q.shape[-1] ** -0.5
    weights = q.new_zeros(B, Lq, Lk) if average else q.new_empty(B, H, Lq, Lk)
    options = DenseOptions(*(None if x is None else x.expand(B, H, Lq, x.shape[-1]) for x in options))
    samples, heads = _tile_size(H, Lq * Lk)
    buffer = q.new_empty(2, min(samples, B), heads, Lq, Lk)
    for b, h in itertools.product(range(0, B, samples), range(0, H, heads)):
        at = slice(b, b + samples), slice(h, h + heads)
        n, m = q[at].shape[:2]
        s, w = buffer[:, :n, :m]
        w = w if average else weights[at]
        torch.bmm(scaled[at].flatten(0, 1), k[at].flatten(0, 1).mT, out=s.flatten(0, 1))
        _softmax(s, DenseOptions(*(None if x is None else x[at] for x in options)), w)
        out[at] = torch.bmm(w.flatten(0, 1), v[at].flatten(0, 1)).unflatten(0, (n, m))
        if average:
            weights[at[0]] += w.sum(1) if m > 1 else w[:, 0]
    return out, weights.div_(H) if average else weights


def _softmax(s: Tensor, options: DenseOptions, w: Tensor) -> None:
    """Writes the softmax of the scores s into w, both (samples, heads, Lq, Lk). Overwrites s."""
    if options.bias is not None:
        s += options.bias
    if options.masked is not None:
        s.masked_fill_(options.masked, -torch.inf)
    torch.softmax(s, -1, out=w)
    if options.fully_masked is not None:
        w.masked_fill_(options.fully_masked, 0)


def _tile_size(H: int, pairs: int) -> tuple[int, int]:
    """Returns the numbers of samples and of heads in a tile. `pairs` is Lq * Lk.

    A tile has one or more samples with all H heads, or some heads of one sample.
    """
    fitting = TILE_SCORES // max(1, pairs)
    return max(1, fitting // H), max(1, min(H, fitting))
