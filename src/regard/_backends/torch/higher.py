"""Forward-mode derivatives, and derivatives of the backward pass: exact, in plain torch, at O(n) memory.

One identity gives both. Attention maps x = (q, k, v, bias, by_head, sink) to y = (out, LSE). Its backward
pass J(x)^T dy, contracted with t, is the number <J(x) t, dy>. So the derivative of the backward pass by dy is
the forward mode J t, and its derivative by x is the gradient of <J t, dy>, which `_gradients` writes out.

Only operations that differentiate are used: under autograd the functions here have derivatives of their own,
of any order, then at n x n memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._call.spec import Problem
from ...masks._pairs import cut
from .tiles import InputList, TileData, gather, inputs, parts

INF = float("inf")


def jvp(problem: Problem, tangents: InputList) -> tuple[Tensor, Tensor]:
    """The tangents of out (B, Hq, Lq, Dv) and LSE (B, Hq, Lq), from those of q, k, v, bias, by_head and sink.

    None is a tangent of zero.
    """
    out, lse = _empty_results(problem)
    with torch.autocast(problem.spec.device.type, enabled=False):
        for part in parts(problem, tangents, None, None):
            _write(part, _linearise(part), out, lse)
    return out.to(problem.spec.dtype), lse[..., 0]


def double_backward(
    problem: Problem, dout: Tensor, dlse: Tensor | None, tangents: InputList
) -> tuple[Tensor | None, ...]:
    """The gradients of <backward(x, dout, dlse), tangents> by q, k, v, bias, by_head, sink, dout and dlse.

    The first six are also the forward mode of the backward pass while dout and dlse stay as they are.
    """
    given, (out, lse) = inputs(problem), _empty_results(problem)
    sums = [None if x is None else lse.new_zeros(x.shape) for x in given]
    with torch.autocast(problem.spec.device.type, enabled=False):
        for part in parts(problem, tangents, dout, dlse):
            line = _linearise(part)
            _write(part, line, out, lse)
            for total, place, more in zip(sums, part.tile.places, _gradients(part, line), strict=True):
                if total is not None and more is not None:
                    view = cut(total, *place)
                    view += more.sum_to_size(view.shape)
    found = (s if s is None or x is None else s.to(x.dtype) for s, x in zip(sums, given, strict=True))
    return (*found, out.to(dout.dtype), None if dlse is None else lse[..., 0])


def _empty_results(problem: Problem) -> tuple[Tensor, Tensor]:
    spec = problem.spec
    out = torch.empty(spec.B, spec.Hq, spec.Lq, spec.Dv, dtype=spec.lse_dtype, device=spec.device)
    return out, out.new_empty(*out.shape[:3], 1)


class _Line(NamedTuple):
    """The tangents of a part's results, and what they were made of."""

    out: Tensor
    lse: Tensor
    p: Tensor  # probabilities
    p_sink: Tensor
    bad: Tensor | None  # rows with NaN; everything but `out` is computed without them
    slope: Tensor | None  # the softcap's derivative
    bend: Tensor | None  # its second derivative divided by the first
    ta: Tensor  # tangent of the scores before softcap
    ts: Tensor  # and after softcap and bias
    tw: Tensor  # of the weights, dropout included


def _write(part: TileData, line: _Line, out: Tensor, lse: Tensor) -> None:
    cut(out, *part.tile.queries).copy_(line.out)
    cut(lse, *part.tile.queries).copy_(spread_nan(line.lse, line.bad, None))


def _linearise(part: TileData) -> _Line:
    x, t, cap = part.x, part.t, part.spec.softcap
    s, ta = times(x.q, x.k.mT), times(t.q, x.k.mT) + times(x.q, t.k.mT)
    ts, slope, bend = ta, None, None
    if cap is not None:
        s = torch.tanh(s / cap)
        slope, bend = 1 - s * s, s * (-2 / cap)
        s, ts = s * cap, slope * ta
    for more in (x.bias, part.nonfinite):
        s = s if more is None else s + more
    ts = ts if t.bias is None else ts + t.bias
    s = s if part.visible is None else torch.where(part.visible, s, -INF)
    p, p_sink, bad = softmax(s, x.sink)
    lse = (p * ts).sum(-1, keepdim=True) + p_sink * t.sink
    w, tw = _dropped(part, p), spread_nan(_dropped(part, p * (ts - lse)), bad, part.visible)
    return _Line(times(w, t.v) + times(tw, x.v), lse, p, p_sink, bad, slope, bend, ta, ts, tw)


def _gradients(part: TileData, line: _Line) -> InputList:
    """Of <line.out, dout> + <line.lse, dlse> by the inputs: `dx` arrives at x, `dtx` at its tangent."""
    x, t, p, p_sink = part.x, part.t, line.p, line.p_sink
    dw, dtw = _dropped(part, times(part.dout, t.v.mT)), _dropped(part, times(part.dout, x.v.mT))
    rest = part.dlse - (p * dtw).sum(-1, keepdim=True)
    pull = dtw + rest
    dts = p * pull  # what the backward pass has for the scores
    dp, dp_sink = dw + line.ts * pull - line.lse * dtw, rest * t.sink
    mean = (p * dp).sum(-1, keepdim=True) + p_sink * dp_sink
    ds = spread_nan(p * (dp - mean), line.bad, part.visible)
    ds_sink = spread_nan(p_sink * (dp_sink - mean), line.bad, None)
    da, dta = ds, dts
    if line.slope is not None and line.bend is not None:
        da, dta = line.slope * (ds + line.bend * line.ta * dts), line.slope * dts
    return (
        part.spec.scale * (times(da, x.k) + times(dta, t.k)),
        _summed(da, x.q, x.k) + _summed(dta, t.q, x.k),
        _summed(line.tw, part.dout, x.v),
        ds,
        gather(x.by_head, part.distance, ds) if x.by_head is not None and part.distance is not None else None,
        ds_sink.sum((0, 2, 3)),
    )


def softmax(s: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The probabilities of the keys and of the sink; zeros where there is nothing to choose from.

    Also zeros in rows that have NaN; those are told, if there are any.
    """
    top = sink.expand(*s.shape[:-1], 1)
    if s.shape[-1]:
        top = torch.maximum(top, s.amax(-1, keepdim=True))
    top = torch.where(top == -INF, 0.0, top)
    e, e_sink = torch.exp(s - top), torch.exp(sink - top)
    total = e.sum(-1, keepdim=True) + e_sink
    total = torch.where(total == 0, 1.0, total)
    p, p_sink, bad = e / total, e_sink / total, total.isnan()
    if not bool(bad.any()):
        return p, p_sink, None
    return torch.where(bad, 0.0, p), torch.where(bad, 0.0, p_sink), bad


def spread_nan(x: Tensor, bad: Tensor | None, visible: Tensor | None) -> Tensor:
    """x with NaN in bad rows; of pairs, in the visible ones, so that no hidden key gets any of it."""
    if bad is None:
        return x
    return torch.where(bad if visible is None else bad & visible, float("nan"), x)


def _dropped(part: TileData, pairs: Tensor) -> Tensor:
    return pairs if part.keep is None else pairs * part.keep


# Products of h query heads with the n key heads that they share


def times(rows: Tensor, keys: Tensor) -> Tensor:
    """(b, h, R, x) times (b, n, x, y) is (b, h, R, y)."""
    return (_folded(rows, keys) @ keys).view(*rows.shape[:3], keys.shape[-1])


def _summed(pairs: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """(b, h, R, K) and (b, h, R, x), summed over the rows: (b, n, K, x) with the n of `keys`."""
    return _folded(pairs, keys).mT @ _folded(rows, keys)


def _folded(rows: Tensor, keys: Tensor) -> Tensor:
    """(b, h, R, x) as (b, n, h / n * R, x)."""
    (b, h, R, x), n = rows.shape, keys.shape[1]
    return rows.reshape(b, n, h // n * R, x)
