"""Converts a trace to JSON, for the server and for files. Arrays are zlib streams in base64."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from ..masks import Window
from ..see import Layer
from ._trace import Array, Trace

THUMBNAIL = 32  # the largest number of blocks on a side of a thumbnail
TYPES = {"float32": "f4", "float16": "f2", "int32": "i4"}
# Name in the JSON -> field of `Facts`. Dim 0 of these fields is the head.
ARRAYS = {"column": "column", "entropy": "entropy", "normalized": "normalized", "rowMax": "row_max"}
ARRAYS |= {"delimiters": "delimiters", "topWeights": "top_weights", "topKeys": "top_keys"}

Head = tuple[int, int]  # layer, head


def pack(array: Array) -> dict[str, Any]:
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii")
    return {"type": TYPES[str(array.dtype)], "shape": list(array.shape), "data": data}


def heads_of(trace: Trace) -> list[Head]:
    return [(i, head) for i, layer in enumerate(trace.layers) for head in range(layer.heads)]


def overview(trace: Trace, heads: Iterable[Head]) -> dict[str, Any]:
    """Returns the tokens of a trace, and a thumbnail and summary statistics of each head."""
    heads = list(heads)
    levels = trace.facts(heads[0][0]).mass  # all layers have these shapes
    level = next(i for i, mass in enumerate(levels) if max(mass.shape[1:]) <= THUMBNAIL)
    roles = {layer: trace.roles(layer) for layer in {layer for layer, _ in heads}}
    same = trace.queries is trace.keys or trace.queries == trace.keys
    return {
        "title": trace.title,
        "model": trace.model,
        "keys": list(trace.keys),
        "queries": None if same else list(trace.queries),
        "offset": trace.offset,
        "layers": [layer.name for layer in trace.layers],
        "heads": [_summary(trace, layer, head) | {"roles": roles[layer][head]} for layer, head in heads],
        "thumbnails": pack(np.stack([trace.facts(layer).mass[level][head] for layer, head in heads])),
        "thumbnailBlock": trace.block << level,
    }


def _summary(trace: Trace, layer: int, head: int) -> dict[str, Any]:
    facts = trace.facts(layer)
    mass = facts.by_distance[head].astype(np.float64)
    return {
        "layer": layer,
        "head": head,
        "entropy": float(facts.normalized[head].mean()),
        "largest": float(facts.row_max[head].mean()),
        "delimiters": float(facts.delimiters[head].mean()),
        "distance": float((mass * np.abs(facts.distances)).sum() / max(mass.sum(), 1e-30)),
    }


def head_facts(trace: Trace, layer: int, head: int, coarser: int = 0) -> dict[str, Any]:
    """Returns all facts of a head, with block masses and maxima of pyramid level `coarser`.

    Level 0 has the finest blocks, and the block size doubles with each level.
    """
    facts = trace.facts(layer)
    block = trace.block << coarser
    nonzero = np.flatnonzero(facts.by_distance[head])
    first, end = (int(nonzero[0]), int(nonzero[-1]) + 1) if len(nonzero) else (0, 1)
    distances = pack(facts.by_distance[head][first:end])
    return {
        "layer": layer,
        "head": head,
        "block": block,
        "mass": pack(facts.mass[coarser][head]),
        # A block of one weight has a maximum equal to its mass, so the maxima are left out.
        "max": None if block == 1 else pack(facts.max[coarser][head]),
        **{name: pack(getattr(facts, field)[head]) for name, field in ARRAYS.items()},
        "distances": {"first": int(facts.distances[first]), "mass": distances},
        "hasSink": trace.layers[layer].options.get("sink") is not None,
    }


def queries_and_keys(trace: Trace, layer: int, head: int) -> dict[str, Any]:
    """Returns a head's q and k in float16, and the options for computing weights in the browser."""
    call = trace.layers[layer]
    q, k = trace.queries_and_keys(call, head)
    left, right = _window(call)
    scale, sink = call.options.get("scale"), call.options.get("sink")
    return {
        "q": pack(_half(q)),
        "k": pack(_half(k)),
        "scale": q.shape[1] ** -0.5 if scale is None else float(scale),
        "softcap": call.options.get("softcap"),
        "sink": None if sink is None else float(sink[head]),
        "left": left,
        "right": right,
        "offset": trace.offset,
    }


def _half(x: Tensor) -> Array:
    half: Array = x.detach().half().cpu().numpy()
    if not np.isfinite(half).all():
        raise ValueError('embed="qk": expected queries and keys within the range of float16, got larger ones')
    return half


def _window(layer: Layer) -> tuple[int | None, int | None]:
    """Returns how far the layer's window reaches to the left and to the right. None: no limit.

    Raises ValueError for a mask that is not a window and for a bias, because the page supports
    neither.
    """
    mask = layer.options.get("mask")
    if layer.options.get("bias") is not None:
        raise ValueError('embed="qk": expected no bias, got one; use rows=[...] instead')
    if mask is None:
        return None, None
    if isinstance(mask, Window):
        return mask.left, mask.right
    raise ValueError(
        f'embed="qk": expected no mask, Causal or Window, got {mask!r:.80}; use rows=[...] instead'
    )
