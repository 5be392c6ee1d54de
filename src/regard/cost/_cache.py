"""Bytes of caches: what the tokens need, and what an object of `regard.cache` allocates for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._tools.arguments import count
from ..cache import SlidingCache
from ..cache._rows import LEAST_ROWS
from ._formats import Format, format_of
from ._layers import AttentionSpec, LayerSpec
from ._model import ModelSpec

What = LayerSpec | ModelSpec | Sequence[LayerSpec]


def layers_of(what: What) -> tuple[LayerSpec, ...]:
    if isinstance(what, LayerSpec):
        return (what,)
    return what.layers if isinstance(what, ModelSpec) else tuple(what)


def cache_bytes(
    what: What, tokens: int, *, B: int = 1, format: str | torch.dtype | Format = torch.float16
) -> int:
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
    what: What,
    tokens: int,
    *,
    B: int = 1,
    format: str | torch.dtype | Format = torch.float16,
    capacity: int | None = None,
    page: int | None = None,
) -> int:
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
