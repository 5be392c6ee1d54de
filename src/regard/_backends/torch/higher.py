"""Forward-mode derivatives and double backward, exact, in PyTorch operations, at O(n) memory.

One identity gives both. Attention maps x = (q, k, v, bias, by_head, sink) to y = (out, LSE), where
by_head holds ALiBi slopes or a relative bias. J(x) is the derivative of y with respect to x. The
backward pass J(x)^T dy, contracted with a tangent t of x, is the number <J(x) t, dy>. The
derivative of this number with respect to dy is forward mode, J t. Its derivative with respect to x
is double backward, computed by `_gradients`.

All operations are differentiable, so that autograd can differentiate these functions to any order.
This takes n x n memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._call.spec import Problem
from ...masks._pairs import cut
from .tiles import InputList, TileData, gather, inputs, tiles

INF = float("inf")


def jvp(problem: Problem, tangents: InputList) -> tuple[Tensor, Tensor]:
    """Computes the tangents of out (B, Hq, Lq, Dv) and LSE (B, Hq, Lq).

    `tangents` belong to q, k, v, bias, by_head and sink. None is a zero tangent.
    """
    out, lse = _empty_results(problem)
    with torch.autocast(problem.spec.device.type, enabled=False):
        for data in tiles(problem, tangents, None, None):
            _write(data, _linearise(data), out, lse)
    return out.to(problem.spec.dtype), lse[..., 0]


def double_backward(
    problem: Problem, dout: Tensor, dlse: Tensor | None, tangents: InputList
) -> tuple[Tensor | None, ...]:
    """Computes eight gradients of the inner product <backward(x, dout, dlse), tangents>.

    They are the gradients with respect to the six inputs x = (q, k, v, bias, by_head, sink), to
    dout and to dlse. The first six also equal the derivatives of backward(x, dout, dlse) in the
    direction `tangents` of x.
    """
    xs, (out, lse) = inputs(problem), _empty_results(problem)
    sums = [None if x is None else lse.new_zeros(x.shape) for x in xs]
    with torch.autocast(problem.spec.device.type, enabled=False):
        for data in tiles(problem, tangents, dout, dlse):
            lin = _linearise(data)
            _write(data, lin, out, lse)
            for total, slices, grad in zip(sums, data.tile.slices, _gradients(data, lin), strict=True):
                if total is not None and grad is not None:
                    view = cut(total, *slices)
                    view += grad.sum_to_size(view.shape)
    grads = (s if s is None or x is None else s.to(x.dtype) for s, x in zip(sums, xs, strict=True))
    return (*grads, out.to(dout.dtype), None if dlse is None else lse[..., 0])


def _empty_results(problem: Problem) -> tuple[Tensor, Tensor]:
    spec = problem.spec
    out = torch.empty(spec.B, spec.Hq, spec.Lq, spec.Dv, dtype=spec.lse_dtype, device=spec.device)
    return out, out.new_empty(*out.shape[:3], 1)


class _Linearised(NamedTuple):
    """The tangents of out and LSE in a tile, and intermediate values of their computation."""

    out: Tensor
    lse: Tensor
    p: Tensor  # probabilities
    p_sink: Tensor
    nan_rows: Tensor | None  # True for rows with NaN, in which p, p_sink and lse are 0, out and tw NaN
    slope: Tensor | None  # the derivative of the softcap
    bend: Tensor | None  # the second derivative of the softcap divided by the first
    ta: Tensor  # tangent of the scores before softcap
    ts: Tensor  # tangent of the scores after softcap and bias
    tw: Tensor  # tangent of the weights after dropout


def _write(data: TileData, lin: _Linearised, out: Tensor, lse: Tensor) -> None:
    cut(out, *data.tile.queries).copy_(lin.out)
    cut(lse, *data.tile.queries).copy_(spread_nan(lin.lse, lin.nan_rows, None))


def _linearise(data: TileData) -> _Linearised:
    """Computes the tangents of out and LSE in a tile."""
    x, t, cap = data.x, data.t, data.spec.softcap
    s, ta = times(x.q, x.k.mT), times(t.q, x.k.mT) + times(x.q, t.k.mT)
    ts, slope, bend = ta, None, None
    if cap is not None:
        s = torch.tanh(s / cap)
        slope, bend = 1 - s * s, s * (-2 / cap)
        s, ts = s * cap, slope * ta
    for term in (x.bias, data.nonfinite):
        s = s if term is None else s + term
    ts = ts if t.bias is None else ts + t.bias
    s = s if data.visible is None else torch.where(data.visible, s, -INF)
    p, p_sink, nan_rows = softmax(s, x.sink)
    lse = (p * ts).sum(-1, keepdim=True) + p_sink * t.sink
    w, tw = _dropped(data, p), spread_nan(_dropped(data, p * (ts - lse)), nan_rows, data.visible)
    return _Linearised(times(w, t.v) + times(tw, x.v), lse, p, p_sink, nan_rows, slope, bend, ta, ts, tw)


def _gradients(data: TileData, lin: _Linearised) -> InputList:
    """Computes the gradients of <lin.out, dout> + <lin.lse, dlse> with respect to the inputs.

    Prefixes of names: t is a tangent, d a gradient, dt the gradient with respect to a tangent. For
    the scores s these are `ts`, `ds` and `dts`.
    """
    x, t, p, p_sink = data.x, data.t, lin.p, lin.p_sink
    dw, dtw = _dropped(data, times(data.dout, t.v.mT)), _dropped(data, times(data.dout, x.v.mT))
    dtlse = data.dlse - (p * dtw).sum(-1, keepdim=True)
    pull = dtw + dtlse
    dts = p * pull  # the gradient of the scores in the backward pass
    dp, dp_sink = dw + lin.ts * pull - lin.lse * dtw, dtlse * t.sink
    mean = (p * dp).sum(-1, keepdim=True) + p_sink * dp_sink
    ds = spread_nan(p * (dp - mean), lin.nan_rows, data.visible)
    ds_sink = spread_nan(p_sink * (dp_sink - mean), lin.nan_rows, None)
    da, dta = ds, dts
    if lin.slope is not None and lin.bend is not None:
        da, dta = lin.slope * (ds + lin.bend * lin.ta * dts), lin.slope * dts
    return (
        data.spec.scale * (times(da, x.k) + times(dta, t.k)),
        _summed(da, x.q, x.k) + _summed(dta, t.q, x.k),
        _summed(lin.tw, data.dout, x.v),
        ds,
        gather(x.by_head, data.distance, ds) if x.by_head is not None and data.distance is not None else None,
        ds_sink.sum((0, 2, 3)),
    )


def softmax(s: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the probabilities of the keys and of the sink, and which rows contain NaN.

    The third result is a bool tensor, or None if no row contains NaN. In fully masked rows and rows
    with NaN, all probabilities are zero.
    """
    top = sink.expand(*s.shape[:-1], 1)
    if s.shape[-1]:
        top = torch.maximum(top, s.amax(-1, keepdim=True))
    top = torch.where(top == -INF, 0.0, top)
    e, e_sink = torch.exp(s - top), torch.exp(sink - top)
    total = e.sum(-1, keepdim=True) + e_sink
    total = torch.where(total == 0, 1.0, total)
    p, p_sink, nan_rows = e / total, e_sink / total, total.isnan()
    if not bool(nan_rows.any()):
        return p, p_sink, None
    return torch.where(nan_rows, 0.0, p), torch.where(nan_rows, 0.0, p_sink), nan_rows


def spread_nan(x: Tensor, nan_rows: Tensor | None, visible: Tensor | None) -> Tensor:
    """Returns x with NaN in the rows `nan_rows`.

    If `visible` is given, only the visible pairs of these rows become NaN.
    """
    if nan_rows is None:
        return x
    return torch.where(nan_rows if visible is None else nan_rows & visible, float("nan"), x)


def _dropped(data: TileData, pairs: Tensor) -> Tensor:
    return pairs if data.keep is None else pairs * data.keep


# Products of h query heads with the n key heads that they read


def times(rows: Tensor, keys: Tensor) -> Tensor:
    """Computes rows @ keys, where each query head uses its key head.

    rows is (b, h, R, x) with h query heads, keys is (b, n, x, y) with n key heads, and the result
    is (b, h, R, y).
    """
    return (_folded(rows, keys) @ keys).view(*rows.shape[:3], keys.shape[-1])


def _summed(pairs: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Computes pairs^T @ rows and sums over the query heads of each key head.

    pairs is (b, h, R, K), rows is (b, h, R, x), and the result is (b, n, K, x), where n is the
    number of key heads in `keys`.
    """
    return _folded(pairs, keys).mT @ _folded(rows, keys)


def _folded(rows: Tensor, keys: Tensor) -> Tensor:
    """Folds query heads into the rows of their key head: (b, h, R, x) -> (b, n, h / n * R, x).

    n is the number of key heads in `keys`.
    """
    (b, h, R, x), n = rows.shape, keys.shape[1]
    return rows.reshape(b, n, h // n * R, x)
