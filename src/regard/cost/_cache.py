"""Bytes of caches: what the tokens need, and what an object of `regard.cache` allocates for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._call.spec import DTYPES
from .._tools.arguments import count, describe
from ..cache import SlidingCache
from ..cache._retention import LEAST_ROWS
from ._layers import AttentionSpec, LayerSpec
from ._model import ModelSpec

What = LayerSpec | ModelSpec | Sequence[LayerSpec]


@dataclass(frozen=True)
class Format:
    """`group` values take `group_bytes`, a group begun counts in full; a row takes `row_bytes` besides."""

    name: str
    group: int
    group_bytes: int
    row_bytes: int = 0

    def row(self, values: int) -> int:
        """Bytes of a row of so many values."""
        return -(-values // self.group) * self.group_bytes + self.row_bytes


FORMATS = {
    found.name: found
    for found in (
        Format("float64", 1, 8),
        Format("float32", 1, 4),
        Format("bfloat16", 1, 2),
        Format("float16", 1, 2),
        Format("int8", 32, 34),  # of `QuantizedCache`: codes, and a scale in float16
        Format("int4", 32, 20),  # codes, a scale and the low end
        Format("q8_0", 32, 34),  # of llama.cpp
        Format("q8_KV", 1, 1, 8),  # of ik_llama.cpp: one scale and one sum for a row
    )
}


AnyFormat = str | torch.dtype | Format  # a name, a dtype, or itself


def format_of(given: AnyFormat) -> Format:
    """A format by its name or dtype, or itself."""
    if isinstance(given, Format):
        return given
    name = str(given).removeprefix("torch.")
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {describe(given)}")
    return FORMATS[name]


def dtype_of(name: str) -> torch.dtype:
    """A floating dtype by its name."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in known:
        raise ValueError(f"dtype: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def layers_of(what: What) -> tuple[LayerSpec, ...]:
    if isinstance(what, LayerSpec):
        return (what,)
    return what.layers if isinstance(what, ModelSpec) else tuple(what)


def cache_bytes(what: What, tokens: int, *, B: int = 1, format: AnyFormat = torch.float16) -> int:
    """Bytes that keys and values of so many tokens need: the architecture, without any slack.

    Windows keep no more than they see. States of linear layers are in float32 whatever the format.
    """
    kept, tokens = format_of(format), count("tokens", tokens)
    most = [(layer, tokens if layer.most_kept is None else layer.most_kept) for layer in layers_of(what)]
    return B * sum(_bytes(layer, min(tokens, n), kept) for layer, n in most)


def _bytes(layer: LayerSpec, tokens: int, kept: Format) -> int:
    token = sum(rows.heads * kept.row(rows.width) for rows in layer.kept)
    return tokens * token + layer.state * (8 if kept.name == "float64" else 4)


def allocated_bytes(
    what: What, tokens: int, *, B: int = 1, format: AnyFormat = torch.float16, capacity: int | None = None,
    page: int | None = None,
) -> int:  # fmt: skip
    """`nbytes` of the caches of `regard.cache` that hold so many tokens of B samples.

    Windows have a `SlidingCache`, latents a `LatentCache`, states a `LinearCache`.

    Args:
        capacity: rows of each cache. Default: those that a cache makes that grows and was given all tokens
            in one call.
        page: tokens of a page, for a `PagedCache` with as many pages as are needed.
    """
    kept, tokens = format_of(format), count("tokens", tokens)
    if capacity is not None and capacity < tokens:
        raise ValueError(f"capacity: expected at least the {tokens} tokens, got {capacity}")
    if capacity is not None and page is not None:
        raise ValueError(f"page: expected None with a capacity, got {page}")
    rows = capacity or (tokens and max(tokens, LEAST_ROWS))
    if page is not None:
        rows = -(-tokens // count("page", page, 1)) * page
    return B * sum(_bytes(layer, _rows(layer, rows), kept) for layer in layers_of(what))


def _rows(layer: LayerSpec, rows: int) -> int:
    """Returns the rows of a layer's cache: a window has a `SlidingCache`."""
    if not isinstance(layer, AttentionSpec) or layer.window is None:
        return rows
    return SlidingCache(1, 1, 1, window=layer.window, sinks=layer.sinks).capacity or 0
