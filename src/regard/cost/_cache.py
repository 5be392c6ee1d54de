"""Bytes of caches: what the tokens need, and what an object of `regard.cache` allocates for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._tools.arguments import count
from ..cache import SlidingCache
from ..cache._retention import LEAST_ROWS
from ._formats import Format, format_of
from ._layers import Heads, Layer
from ._model import Model

What = Layer | Model | Sequence[Layer]


def layers_of(what: What) -> tuple[Layer, ...]:
    if isinstance(what, Layer):
        return (what,)
    return what.layers if isinstance(what, Model) else tuple(what)


def cache_bytes(
    what: What, tokens: int, *, B: int = 1, format: str | torch.dtype | Format = torch.float16
) -> int:
    """Bytes that keys and values of so many tokens need: the architecture, without any slack.

    Windows keep no more than they see. States of linear layers are in float32 whatever the format.
    """
    kept, tokens = format_of(format), count("tokens", tokens)
    return B * sum(_architecture(layer, tokens, kept) for layer in layers_of(what))


def _architecture(layer: Layer, tokens: int, kept: Format) -> int:
    held = tokens if layer.most_kept is None else min(tokens, layer.most_kept)
    return held * _token(layer, kept) + _state(layer, kept)


def _token(layer: Layer, kept: Format) -> int:
    """Bytes of one token."""
    return sum(rows.heads * kept.row(rows.width) for rows in layer.kept)


def _state(layer: Layer, kept: Format) -> int:
    return layer.state * (8 if kept.name == "float64" else 4)


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
    return B * sum(
        _rows(layer, rows) * _token(layer, kept) + _state(layer, kept) for layer in layers_of(what)
    )


def _rows(layer: Layer, rows: int) -> int:
    if not isinstance(layer, Heads) or layer.window is None:
        return rows
    return SlidingCache(1, 1, 1, window=layer.window, sinks=layer.sinks).capacity or 0
