"""A call cut into tiles of samples, heads and query rows, so that tensors of pairs stay small.

In a tile, pairs are (b, h, R, K) and what belongs to a row is (b, h, R, 1); K are the keys from the first to
the last that any of its rows sees. All numbers are in the dtype that is computed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..._call.dropout import kept_at
from ..._call.spec import Problem, Spec
from ...masks._mask import part_of
from ...masks._pairs import Rectangle, cut

INF = float("inf")
PAIRS = 2**19  # in a tile: two megabytes of float32

Place = tuple[slice, ...]
InputList = Sequence[Tensor | None]  # in the order of Inputs


class Inputs(NamedTuple):
    """The differentiable inputs of a call or a tile, or their tangents."""

    q: Tensor  # (B, Hq, Lq, D), times scale
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor  # (B, Hkv, Lk, Dv)
    bias: Tensor | None  # (1 or B, 1 or Hq, 1 or Lq, 1 or Lk); in a tile also what by_head gives
    by_head: Tensor | None  # ALiBi's slopes (Hq,), or the relative bias (Hq, 2 * far + 1)
    sink: Tensor  # (Hq, 1, 1); -inf if there is none


class Tile(NamedTuple):
    samples: slice
    kv: slice  # key heads
    heads: slice
    rows: slice
    keys: slice

    @property
    def queries(self) -> Place:
        return self.samples, self.heads, self.rows

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the tile lies in each of the Inputs."""
        keys, heads = (self.samples, self.kv, self.keys), (self.heads,)
        return self.queries, keys, keys, (*self.queries, self.keys), heads, heads

    def numbers(self, device: torch.device) -> list[Tensor]:
        """The samples, heads, rows and keys, int64."""
        return [torch.arange(s.start, s.stop, device=device) for s in self.places[3]]


class TileData(NamedTuple):
    """What a tile works with."""

    spec: Spec
    tile: Tile
    x: Inputs
    t: Inputs
    dout: Tensor  # (b, h, R, Dv)
    dlse: Tensor  # (b, h, R, 1)
    nonfinite: Tensor | None  # NaN where a query or a key is not finite
    visible: Tensor | None
    distance: Tensor | None  # pos - j, (1 or b, 1, R, K), if by_head needs it
    keep: Tensor | None  # what dropout multiplies weights by


def parts(
    problem: Problem, tangents: InputList, dout: Tensor | None, dlse: Tensor | None
) -> Iterator[TileData]:
    """The parts of a call; a tangent, dout or dlse of None is zero."""
    call = _prepare(problem, tangents, dout, dlse)
    for tile in _tiles(problem.spec):
        yield _part(call, tile)


def inputs(problem: Problem) -> InputList:
    """The inputs as given. Their gradients have these shapes and dtypes."""
    bias = problem.bias if isinstance(problem.bias, Tensor) else None
    return problem.q, problem.k, problem.v, bias, problem.by_head, problem.sink


# by_head, for the distances pos - j from -far to far, and the bias of pairs; distance is (1 or b, 1, R, K)


def spread(by_head: Tensor, distance: Tensor) -> Tensor:
    """The bias of the pairs, (1 or b, h, R, K)."""
    if by_head.ndim == 1:
        return -by_head[:, None, None] * distance.abs()
    return by_head[:, _column(by_head, distance)[:, 0]].movedim(0, 1)


def gather(by_head: Tensor, distance: Tensor, pairs: Tensor) -> Tensor:
    """The transpose of `spread`: pairs (b, h, R, K) summed into the shape of by_head."""
    if by_head.ndim == 1:
        return -(pairs * distance.abs()).sum((0, 2, 3))
    columns = _column(by_head, distance).expand_as(pairs)
    columns, pairs = (x.movedim(1, 0).flatten(1) for x in (columns, pairs))
    return torch.zeros_like(by_head).scatter_add(1, columns, pairs)


def _column(by_head: Tensor, distance: Tensor) -> Tensor:
    far = by_head.shape[1] // 2
    return distance.clamp(-far, far) + far


# The whole call


class _Call(NamedTuple):
    problem: Problem
    x: Inputs
    t: Inputs
    dout: Tensor  # (B, Hq, Lq, Dv)
    dlse: Tensor  # (B, Hq, Lq, 1)
    nonfinite: (
        tuple[Tensor, Tensor] | None
    )  # (B, Hq, Lq, 1), (B, Hkv, Lk, 1): NaN for rows that are not finite


def _prepare(problem: Problem, tangents: InputList, dout: Tensor | None, dlse: Tensor | None) -> _Call:
    spec = problem.spec
    D, Dv, of_rows, of_keys = spec.D, spec.Dv, (spec.B, spec.Hq, spec.Lq), (spec.B, spec.Hkv, spec.Lk)
    q, k, v, bias, by_head, sink = inputs(problem)
    tq, tk, tv, tbias, tby_head, tsink = tangents
    column = None if dlse is None else dlse[..., None]
    (q, tq, dout, dlse), bad_row = _finite(spec, of_rows, [(q, D), (tq, D), (dout, Dv), (column, 1)])
    (k, tk, v, tv), bad_key = _finite(spec, of_keys, [(k, D), (tk, D), (v, Dv), (tv, Dv)])
    x = Inputs(q * spec.scale, k, v, bias, by_head, _sink(spec, sink, -INF))
    t = Inputs(tq * spec.scale, tk, tv, tbias, tby_head, _sink(spec, tsink, 0.0))
    tainted = bool(bad_row.isnan().any()) or bool(bad_key.isnan().any())
    return _Call(problem, x, t, dout, dlse, (bad_row, bad_key) if tainted else None)


def _finite(
    spec: Spec, shape: tuple[int, ...], given: list[tuple[Tensor | None, int]]
) -> tuple[list[Tensor], Tensor]:
    """Tensors (*shape, width), None as zeros, and a column that is NaN where one of them is not finite.

    Such rows become zeros in all of them: no product may carry a hidden one into a result. The column brings
    NaN back into the scores, where hidden pairs are selected away.
    """
    zero = torch.zeros((), dtype=spec.lse_dtype, device=spec.device)
    rows = [zero.expand(*shape, width) if x is None else x.to(zero.dtype) for x, width in given]
    good = torch.stack([x.isfinite().all(-1, keepdim=True) for x in rows]).all(0)
    if not bool(good.all()):
        rows = [torch.where(good, x, 0.0) for x in rows]
    return rows, torch.where(good, zero, float("nan"))


def _sink(spec: Spec, sink: Tensor | None, none: float) -> Tensor:
    if sink is None:
        return torch.full((spec.Hq, 1, 1), none, dtype=spec.lse_dtype, device=spec.device)
    return sink.to(spec.lse_dtype).view(spec.Hq, 1, 1)


def _tiles(spec: Spec) -> Iterator[Tile]:
    """As many rows as PAIRS allows, then query heads of one key head, key heads, samples."""
    group = spec.Hq // max(spec.Hkv, 1)
    pairs, cuts = max(spec.Lk, 1), []
    for size in (spec.Lq, group, spec.Hkv, spec.B):
        step = max(1, min(size, PAIRS // pairs))
        cuts.append([slice(i, min(i + step, size)) for i in range(0, size, step)])
        pairs *= step
    for samples, kv, few, rows in product(*reversed(cuts)):
        # One range: if `few` is not the whole group, there is only one key head.
        heads = slice(kv.start * group + few.start, (kv.stop - 1) * group + few.stop)
        yield Tile(samples, kv, heads, rows, slice(0, spec.Lk))


# One tile


def _part(call: _Call, tile: Tile) -> TileData:
    problem, spec = call.problem, call.problem.spec
    distance = None if call.x.by_head is None else _distance(problem, tile)
    biases = [_pair_bias(whole, tile, distance) for whole in (call.x, call.t)]
    visible = _visible(problem, tile, biases[0])
    if visible is not None:
        tile = tile._replace(keys=_span(visible))
        visible, distance, *biases = (_some_keys(y, tile.keys) for y in (visible, distance, *biases))
    bias, tbias = biases
    if tbias is not None and visible is not None:
        tbias = torch.where(visible, tbias, 0.0)
    x, t = _cut_inputs(call.x, tile, bias), _cut_inputs(call.t, tile, tbias)
    dout, dlse = cut(call.dout, *tile.queries), cut(call.dlse, *tile.queries)
    keep = _keep(problem, tile) if spec.dropout else None
    return TileData(spec, tile, x, t, dout, dlse, _taint(call, tile), visible, distance, keep)


def _cut_inputs(whole: Inputs, tile: Tile, bias: Tensor | None) -> Inputs:
    q, k, v = (cut(x, *place) for x, place in zip(whole[:3], tile.places, strict=False))
    by_head = None if whole.by_head is None else cut(whole.by_head, tile.heads)
    return Inputs(q, k, v, bias, by_head, cut(whole.sink, tile.heads))


def _pair_bias(whole: Inputs, tile: Tile, distance: Tensor | None) -> Tensor | None:
    """(1 or b, 1 or h, 1 or R, 1 or K)."""
    if whole.bias is not None:
        return cut(whole.bias, *tile.places[3]).to(whole.q.dtype)
    if whole.by_head is not None and distance is not None:
        return spread(cut(whole.by_head, tile.heads), distance)
    return None


def _visible(problem: Problem, tile: Tile, bias: Tensor | None) -> Tensor | None:
    """Bool (1 or b, 1 or h, 1 or R, K): what mask and bias allow; None if there is neither."""
    spec, visible = problem.spec, None
    if spec.code:
        mask = part_of(spec.code, problem.tensors, Rectangle(tile.samples, tile.heads, tile.rows, spec.Lk))
        rows = tile.rows.stop - tile.rows.start
        visible = mask.to_dense(rows, spec.Lk, _first(problem, tile), device=spec.device)
        visible = visible[(None,) * (4 - visible.ndim)]
    if bias is None:
        return visible
    finite = (bias != -INF).expand(-1, -1, -1, spec.Lk)
    return finite if visible is None else visible & finite


def _some_keys(pairs: Tensor | None, keys: slice) -> Tensor | None:
    return pairs if pairs is None or pairs.shape[-1] == 1 else pairs[..., keys]


def _span(visible: Tensor) -> slice:
    """From the first to the last key that is seen; if there is none, one key that is hidden."""
    keys = visible.flatten(0, -2).any(0).nonzero()
    return slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(0, min(1, visible.shape[-1]))


def _first(problem: Problem, tile: Tile) -> int | Tensor:
    """The position of the first row: an int, or (b,)."""
    if problem.offset is not None:
        return cut(problem.offset, tile.samples).add(tile.rows.start)
    return int(problem.spec.offset or 0) + int(tile.rows.start)


def _distance(problem: Problem, tile: Tile) -> Tensor:
    _, _, rows, keys = tile.numbers(problem.spec.device)
    start = torch.as_tensor(_first(problem, tile), device=rows.device).view(-1, 1, 1, 1)
    return start.add((rows - tile.rows.start)[:, None]).sub(keys)


def _keep(problem: Problem, tile: Tile) -> Tensor:
    spec, p = problem.spec, problem.spec.dropout
    samples, heads, rows, keys = tile.numbers(spec.device)
    heads = (samples[:, None] * spec.Hq + heads)[..., None, None]
    kept = kept_at(int(problem.seed), p, heads, rows[:, None], keys)
    return kept.to(spec.lse_dtype) * (1 / (1 - p) if p < 1 else 0.0)


def _taint(call: _Call, tile: Tile) -> Tensor | None:
    if call.nonfinite is None:
        return None
    rows, keys = (cut(x, *place) for x, place in zip(call.nonfinite, tile.places, strict=False))
    return rows + keys.repeat_interleave(rows.shape[1] // keys.shape[1], 1).mT
