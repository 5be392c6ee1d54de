"""Splits a call into tiles of samples, heads and query rows, so that score tensors stay small.

A tile has b samples, h query heads, R query rows and K keys. Its scores and weights have the shape
(b, h, R, K), per-row values (b, h, R, 1). The K keys reach from the first to the last key that any
row of the tile may attend to. All values are in the compute dtype (`lse_dtype`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..._call.dropout import keep_mask_of
from ..._call.spec import Problem, Spec
from ...masks._mask import part_of
from ...masks._pairs import Rectangle, cut

INF = float("inf")
PAIRS = 2**19  # the most (query, key) pairs in a tile: two megabytes of float32

Slices = tuple[slice, ...]
InputList = Sequence[Tensor | None]  # in the order of Inputs


class Inputs(NamedTuple):
    """The differentiable inputs of a call or a tile, or their tangents.

    The shapes below are those of a call.
    """

    q: Tensor  # (B, Hq, Lq, D), times scale
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor  # (B, Hkv, Lk, Dv)
    bias: Tensor | None  # (1 or B, 1 or Hq, 1 or Lq, 1 or Lk); in a tile also the bias from by_head
    by_head: Tensor | None  # ALiBi slopes (Hq,), or a relative bias (Hq, 2 * far + 1) at distances up to far
    sink: Tensor  # (Hq, 1, 1); -inf without a sink


class Tile(NamedTuple):
    """The ranges of samples, heads, query rows and keys of a tile."""

    samples: slice
    kv: slice  # key heads
    heads: slice  # query heads
    rows: slice
    keys: slice

    @property
    def queries(self) -> Slices:
        return self.samples, self.heads, self.rows

    @property
    def slices(self) -> tuple[Slices, ...]:
        """For each field of `Inputs`, the slices that select the tile's part of the tensor."""
        keys, heads = (self.samples, self.kv, self.keys), (self.heads,)
        return self.queries, keys, keys, (*self.queries, self.keys), heads, heads

    def indices(self, device: torch.device) -> list[Tensor]:
        """Returns four int64 tensors: the indices of the tile's samples, heads, rows and keys."""
        return [torch.arange(s.start, s.stop, device=device) for s in self.slices[3]]


class TileData(NamedTuple):
    """One tile of a call: its inputs, their tangents, and tensors with an entry for each pair."""

    spec: Spec
    tile: Tile
    x: Inputs
    t: Inputs  # tangents of x
    dout: Tensor  # (b, h, R, Dv)
    dlse: Tensor  # (b, h, R, 1)
    nonfinite: Tensor | None  # (b, h, R, K): NaN if the query or the key is non-finite, else 0
    visible: Tensor | None  # bool (1 or b, 1 or h, 1 or R, K); None if all pairs are visible
    distance: Tensor | None  # query position - key position, (1 or b, 1, R, K), for by_head
    keep: Tensor | None  # dropout factors: 0 or 1 / (1 - p)


def tiles(
    problem: Problem, tangents: InputList, dout: Tensor | None, dlse: Tensor | None
) -> Iterator[TileData]:
    """Yields the tiles of a call. If a tangent, dout or dlse is None, it counts as zeros."""
    call = _prepare(problem, tangents, dout, dlse)
    for tile in _tile_ranges(problem.spec):
        yield _tile_data(call, tile)


def inputs(problem: Problem) -> InputList:
    """Returns the differentiable inputs of a problem, in the order of `Inputs`."""
    bias = problem.bias if isinstance(problem.bias, Tensor) else None
    return problem.q, problem.k, problem.v, bias, problem.by_head, problem.sink


# Conversions between by_head and the bias of (query, key) pairs. Distances are clamped to -far ... far.


def spread(by_head: Tensor, distance: Tensor) -> Tensor:
    """Returns the bias (1 or b, h, R, K) of pairs at `distance` (1 or b, 1, R, K).

    by_head holds ALiBi slopes (h,), or a relative bias (h, 2 * far + 1) with one column for each
    distance from -far to far.
    """
    if by_head.ndim == 1:
        return -by_head[:, None, None] * distance.abs()
    return by_head[:, _column(by_head, distance)[:, 0]].movedim(0, 1)


def gather(by_head: Tensor, distance: Tensor, pairs: Tensor) -> Tensor:
    """Returns the gradient of by_head, the input of `spread`.

    `pairs` (b, h, R, K) is the gradient of the output of `spread`.
    """
    if by_head.ndim == 1:
        return -(pairs * distance.abs()).sum((0, 2, 3))
    columns = _column(by_head, distance).expand_as(pairs)
    columns, pairs = (x.movedim(1, 0).flatten(1) for x in (columns, pairs))
    return torch.zeros_like(by_head).scatter_add(1, columns, pairs)


def _column(by_head: Tensor, distance: Tensor) -> Tensor:
    """Returns the column of a relative bias (Hq, 2 * far + 1) for each distance.

    Distances are clamped to [-far, far].
    """
    far = by_head.shape[1] // 2
    return distance.clamp(-far, far) + far


# The whole call


class _Call(NamedTuple):
    """A call in the compute dtype, with non-finite rows replaced by zeros."""

    problem: Problem
    x: Inputs
    t: Inputs
    dout: Tensor  # (B, Hq, Lq, Dv)
    dlse: Tensor  # (B, Hq, Lq, 1)
    nonfinite: tuple[Tensor, Tensor] | None  # for queries (B, Hq, Lq, 1) and keys (B, Hkv, Lk, 1): NaN or 0


def _prepare(problem: Problem, tangents: InputList, dout: Tensor | None, dlse: Tensor | None) -> _Call:
    spec = problem.spec
    D, Dv, of_rows, of_keys = spec.D, spec.Dv, (spec.B, spec.Hq, spec.Lq), (spec.B, spec.Hkv, spec.Lk)
    q, k, v, bias, by_head, sink = inputs(problem)
    tq, tk, tv, tbias, tby_head, tsink = tangents
    column = None if dlse is None else dlse[..., None]
    (q, tq, dout, dlse), nan_rows = _finite(spec, of_rows, [(q, D), (tq, D), (dout, Dv), (column, 1)])
    (k, tk, v, tv), nan_keys = _finite(spec, of_keys, [(k, D), (tk, D), (v, Dv), (tv, Dv)])
    x = Inputs(q * spec.scale, k, v, bias, by_head, _sink(spec, sink, -INF))
    t = Inputs(tq * spec.scale, tk, tv, tbias, tby_head, _sink(spec, tsink, 0.0))
    nonfinite = bool(nan_rows.isnan().any()) or bool(nan_keys.isnan().any())
    return _Call(problem, x, t, dout, dlse, (nan_rows, nan_keys) if nonfinite else None)


def _finite(
    spec: Spec, shape: tuple[int, ...], tensors: list[tuple[Tensor | None, int]]
) -> tuple[list[Tensor], Tensor]:
    """Replaces rows that are non-finite in any of the tensors by zeros in all tensors.

    `tensors` holds pairs (tensor or None, width). None becomes zeros (*shape, width). Also returns
    a column (*shape, 1) that is NaN for the replaced rows, else 0. With zeros in these rows no
    product carries the NaN of a masked pair into a result. Adding the column to the scores restores
    NaN for visible pairs.
    """
    zero = torch.zeros((), dtype=spec.lse_dtype, device=spec.device)
    rows = [zero.expand(*shape, width) if x is None else x.to(zero.dtype) for x, width in tensors]
    finite = torch.stack([x.isfinite().all(-1, keepdim=True) for x in rows]).all(0)
    if not bool(finite.all()):
        rows = [torch.where(finite, x, 0.0) for x in rows]
    return rows, torch.where(finite, zero, float("nan"))


def _sink(spec: Spec, sink: Tensor | None, default: float) -> Tensor:
    if sink is None:
        return torch.full((spec.Hq, 1, 1), default, dtype=spec.lse_dtype, device=spec.device)
    return sink.to(spec.lse_dtype).view(spec.Hq, 1, 1)


def _tile_ranges(spec: Spec) -> Iterator[Tile]:
    """Yields tiles that have at most 2**19 (query, key) pairs, or a single query row.

    A tile has all keys, and as many query rows of one head as fit. If all rows of a head fit, the
    tile has several query heads of one key head. If all these query heads fit, the tile has several
    key heads. If all key heads fit, it has several samples.
    """
    group = spec.Hq // max(spec.Hkv, 1)
    pairs, cuts = max(spec.Lk, 1), []
    for size in (spec.Lq, group, spec.Hkv, spec.B):
        step = max(1, min(size, PAIRS // pairs))
        cuts.append([slice(i, min(i + step, size)) for i in range(0, size, step)])
        pairs *= step
    for samples, kv, members, rows in product(*reversed(cuts)):
        # The heads are contiguous: a tile with only part of a group has only one key head.
        heads = slice(kv.start * group + members.start, (kv.stop - 1) * group + members.stop)
        yield Tile(samples, kv, heads, rows, slice(0, spec.Lk))


# One tile


def _tile_data(call: _Call, tile: Tile) -> TileData:
    """Slices the tensors of a tile out of a call.

    Keys before the first and after the last visible key of the tile are left out.
    """
    problem, spec = call.problem, call.problem.spec
    distance = None if call.x.by_head is None else _distance(problem, tile)
    biases = [_pair_bias(whole, tile, distance) for whole in (call.x, call.t)]
    visible = _visible(problem, tile, biases[0])
    if visible is not None:
        tile = tile._replace(keys=_key_range(visible))
        visible, distance, *biases = (_select_keys(y, tile.keys) for y in (visible, distance, *biases))
    bias, tbias = biases
    if tbias is not None and visible is not None:
        tbias = torch.where(visible, tbias, 0.0)
    x, t = _cut_inputs(call.x, tile, bias), _cut_inputs(call.t, tile, tbias)
    dout, dlse = cut(call.dout, *tile.queries), cut(call.dlse, *tile.queries)
    keep = _dropout_factors(problem, tile) if spec.dropout else None
    return TileData(spec, tile, x, t, dout, dlse, _nonfinite(call, tile), visible, distance, keep)


def _cut_inputs(whole: Inputs, tile: Tile, bias: Tensor | None) -> Inputs:
    q, k, v = (cut(x, *slices) for x, slices in zip(whole[:3], tile.slices, strict=False))
    by_head = None if whole.by_head is None else cut(whole.by_head, tile.heads)
    return Inputs(q, k, v, bias, by_head, cut(whole.sink, tile.heads))


def _pair_bias(whole: Inputs, tile: Tile, distance: Tensor | None) -> Tensor | None:
    """Returns the bias of a tile, (1 or b, 1 or h, 1 or R, 1 or K), or None if there is none."""
    if whole.bias is not None:
        return cut(whole.bias, *tile.slices[3]).to(whole.q.dtype)
    if whole.by_head is not None and distance is not None:
        return spread(cut(whole.by_head, tile.heads), distance)
    return None


def _visible(problem: Problem, tile: Tile, bias: Tensor | None) -> Tensor | None:
    """Returns bool (1 or b, 1 or h, 1 or R, K), True where mask and bias allow the pair.

    Returns None if the call has neither.
    """
    spec, visible = problem.spec, None
    if spec.code:
        mask = part_of(spec.code, problem.tensors, Rectangle(tile.samples, tile.heads, tile.rows, spec.Lk))
        rows = tile.rows.stop - tile.rows.start
        visible = mask.to_dense(rows, spec.Lk, _first_position(problem, tile), device=spec.device)
        visible = visible[(None,) * (4 - visible.ndim)]
    if bias is None:
        return visible
    allowed = (bias != -INF).expand(-1, -1, -1, spec.Lk)
    return allowed if visible is None else visible & allowed


def _select_keys(pairs: Tensor | None, keys: slice) -> Tensor | None:
    return pairs if pairs is None or pairs.shape[-1] == 1 else pairs[..., keys]


def _key_range(visible: Tensor) -> slice:
    """Returns the range from the first to the last visible key.

    If no key is visible, returns a range of one masked key.
    """
    keys = visible.flatten(0, -2).any(0).nonzero()
    return slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(0, min(1, visible.shape[-1]))


def _first_position(problem: Problem, tile: Tile) -> int | Tensor:
    """Returns the position of the tile's first query: an int, or (b,) if samples differ."""
    if problem.offset is not None:
        return cut(problem.offset, tile.samples).add(tile.rows.start)
    return int(problem.spec.offset or 0) + int(tile.rows.start)


def _distance(problem: Problem, tile: Tile) -> Tensor:
    """Returns the query position minus the key position of each pair, (1 or b, 1, R, K)."""
    _, _, rows, keys = tile.indices(problem.spec.device)
    start = torch.as_tensor(_first_position(problem, tile), device=rows.device).view(-1, 1, 1, 1)
    return start.add((rows - tile.rows.start)[:, None]).sub(keys)


def _dropout_factors(problem: Problem, tile: Tile) -> Tensor:
    """Returns (b, h, R, K): 0 for dropped weights, 1 / (1 - p) for kept weights."""
    spec, p = problem.spec, problem.spec.dropout
    keep = keep_mask_of(problem, *tile.indices(spec.device))
    return keep.to(spec.lse_dtype) * (1 / (1 - p) if p < 1 else 0.0)


def _nonfinite(call: _Call, tile: Tile) -> Tensor | None:
    """Returns (b, h, R, K): NaN where the query or the key is non-finite, else 0.

    Returns None if all are finite.
    """
    if call.nonfinite is None:
        return None
    rows, keys = (cut(x, *slices) for x, slices in zip(call.nonfinite, tile.slices, strict=False))
    return rows + keys.repeat_interleave(rows.shape[1] // keys.shape[1], 1).mT
