"""Additive attention, tiled over samples and query rows.

The score of a pair is score . tanh(q + k), which takes a tensor (Lq, Lk, hidden). A tile has all
keys and so few query rows that its part of this tensor fits into the cache of a CPU core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..._call.additive import AdditiveCall
from ..._call.dropout import keep_mask_at
from ..._call.spec import compute_dtype
from ...masks._mask import part_of
from ...masks._pairs import Rectangle

ELEMENTS = 2**19  # elements (pair, channel) in a tile, unless a single query row has more: 2 MB of float32


class AdditiveTile(NamedTuple):
    """The intermediate results of a tile with b samples and R query rows."""

    h: Tensor  # (b, 1, R, Lk, hidden): tanh(q + k)
    w: Tensor  # (b, 1, R, Lk): the weights before dropout
    keep: Tensor | None  # (b, 1, R, Lk): dropout factors, 0 or 1 / (1 - p)
    broken: Tensor  # bool (b, 1, R, Lk): visible pairs whose query or key is not finite

    @property
    def dropped(self) -> Tensor:
        """The weights after dropout."""
        return self.w if self.keep is None else self.w * self.keep


def forward(call: AdditiveCall) -> tuple[Tensor, Tensor | None]:
    """Returns the output (B, 1, Lq, Dv), and the weights (B, 1, Lq, Lk) or None.

    The operations are differentiable. A row that attends to a key that is not finite is NaN.
    """
    with torch.autocast(call.q.device.type, enabled=False):
        wide = _wide(call)
        outputs, weights = zip(*(_rows(wide, samples) for samples in _sample_ranges(call)), strict=True)
    dtype = call.q.dtype
    return torch.cat(outputs).to(dtype), torch.cat(weights).to(dtype) if call.weights else None


def _rows(wide: AdditiveCall, samples: slice) -> tuple[Tensor, Tensor | None]:
    """Returns all rows of some samples: the output (b, 1, Lq, Dv) and the weights (b, 1, Lq, Lk)."""
    outputs, weights = [], []
    for rows in _row_ranges(wide):
        tile = _tile(wide, samples, rows)
        nan = torch.where(tile.broken.any(-1, keepdim=True), torch.nan, 0.0)
        outputs.append(tile.dropped @ wide.v[samples] + nan.to(wide.v.dtype))
        if wide.weights:
            weights.append(tile.w.masked_fill(tile.broken, torch.nan))
    return torch.cat(outputs, 2), torch.cat(weights, 2) if wide.weights else None


def backward(call: AdditiveCall, dout: Tensor, dweights: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v and score. Tiles are computed again, one at a time."""
    with torch.autocast(call.q.device.type, enabled=False):
        return _backward(call, dout, dweights)


def _backward(call: AdditiveCall, dout: Tensor, dweights: Tensor | None) -> tuple[Tensor, ...]:
    wide, dout = _wide(call), dout.to(compute_dtype(call.q.dtype))
    dq, dk, dv, dscore = (torch.zeros_like(x) for x in wide[:4])
    for samples in _sample_ranges(call):
        for rows in _row_ranges(call):
            at = samples, slice(None), rows
            tile = _tile(wide, samples, rows)
            dv[samples] += tile.dropped.mT @ dout[at]
            dw = dout[at] @ wide.v[samples].mT
            dw = dw if tile.keep is None else dw * tile.keep
            dw = dw if dweights is None else dw + dweights[at]
            ds = tile.w * (dw - (tile.w * dw).sum(-1, keepdim=True))
            dscore += ds.flatten() @ tile.h.flatten(0, -2)
            slope = tile.h.square_().neg_().add_(1).mul_(ds[..., None])  # without the factor score
            dq[at] = slope.sum(3)
            dk[samples] += slope.sum(2)
    grads = dq.mul_(wide.score), dk.mul_(wide.score), dv, dscore
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, call[:4], strict=True))


def _wide(call: AdditiveCall) -> AdditiveCall:
    """Returns the call with its inputs in the compute dtype."""
    dtype = compute_dtype(call.q.dtype)
    return call._replace(**{name: getattr(call, name).to(dtype) for name in call._fields[:4]})


def _sample_ranges(call: AdditiveCall) -> Iterator[slice]:
    """Yields the samples of each tile: several if all their query rows fit into one tile."""
    B, Lq, Lk, hidden = call.sizes
    return _ranges(B, max(1, Lq * Lk * hidden))


def _row_ranges(call: AdditiveCall) -> Iterator[slice]:
    """Yields the query rows of each tile."""
    _, Lq, Lk, hidden = call.sizes
    return _ranges(Lq, max(1, Lk * hidden))


def _ranges(size: int, elements: int) -> Iterator[slice]:
    """Yields ranges of `size` rows that have up to ELEMENTS elements, at `elements` a row.

    Yields one empty range if `size` is 0.
    """
    step = max(1, ELEMENTS // elements)
    yield from (slice(i, min(i + step, size)) for i in range(0, max(size, 1), step))


def _tile(wide: AdditiveCall, samples: slice, rows: slice) -> AdditiveTile:
    q, k = wide.q[samples, :, rows], wide.k[samples]
    h = (q[..., None, :] + k[..., None, :, :]).tanh_()
    bad = wide.bad_q[samples, :, rows] | wide.bad_k[samples]  # (b, 1, R, Lk)
    visible, masked = _visible(wide, samples, rows), wide.bad_k[samples]
    if visible is not None:
        bad, masked = bad & visible, masked | ~visible
    s = (h @ wide.score).masked_fill(masked, torch.finfo(h.dtype).min)
    w = s.softmax(-1).masked_fill(masked, 0)
    return AdditiveTile(h, w, _dropout_factors(wide, samples, rows), bad)


def _visible(call: AdditiveCall, samples: slice, rows: slice) -> Tensor | None:
    """Returns bool (1 or b, 1, R, Lk), True where the mask allows the pair. None without a mask."""
    if not call.code:
        return None
    _, Lq, Lk, _ = call.sizes
    mask = part_of(tuple(call.code), call.tensors, Rectangle(samples, slice(0, 1), rows, Lk))
    visible = mask.to_dense(rows.stop - rows.start, Lk, Lk - Lq + rows.start, device=call.q.device)
    return visible[(None,) * (4 - visible.ndim)]


def _dropout_factors(call: AdditiveCall, samples: slice, rows: slice) -> Tensor | None:
    if call.seed is None:
        return None
    p, device = call.dropout, call.q.device
    sample, row = (torch.arange(s.start, s.stop, device=device) for s in (samples, rows))
    keys = torch.arange(call.sizes[2], device=device)
    keep = keep_mask_at(int(call.seed), p, sample[:, None, None, None], row[:, None], keys)
    return keep.to(compute_dtype(call.q.dtype)) * (1 / (1 - p) if p < 1 else 0.0)
