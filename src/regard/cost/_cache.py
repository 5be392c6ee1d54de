"""Sizes of caches in bytes: the minimum that tokens need, and what `regard.cache` allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .._call.spec import DTYPES
from .._tools.arguments import count, describe
from ..cache import SlidingCache
from ..cache._retention import LEAST_ROWS
from ._layers import AttentionSpec, LayerSpec
from ._model import ModelSpec
from ._modules import layers_in

What = LayerSpec | ModelSpec | Sequence[LayerSpec] | nn.Module


@dataclass(frozen=True)
class Format:
    """A storage format of cached rows.

    A row is stored in groups of `group` elements. Each group takes `group_bytes`, even if it is
    incomplete. Each row takes `row_bytes` in addition.
    """

    name: str
    group: int
    group_bytes: int
    row_bytes: int = 0

    def row(self, values: int) -> int:
        """Returns the size in bytes of a row with `values` elements."""
        return -(-values // self.group) * self.group_bytes + self.row_bytes


FORMATS = {
    format.name: format
    for format in (
        Format("float64", 1, 8),
        Format("float32", 1, 4),
        Format("bfloat16", 1, 2),
        Format("float16", 1, 2),
        Format("int8", 32, 34),  # `QuantizedCache`: 8-bit codes and a float16 scale per group
        Format("int4", 32, 20),  # `QuantizedCache`: 4-bit codes, a scale and the value of code 0 per group
        Format("q8_0", 32, 34),  # llama.cpp
        Format("q8_KV", 1, 1, 8),  # ik_llama.cpp: 8-bit codes, one scale and one sum per row
    )
}


AnyFormat = str | torch.dtype | Format


def format_of(format: AnyFormat) -> Format:
    """Returns the `Format` for a name or a dtype. A `Format` is returned unchanged."""
    if isinstance(format, Format):
        return format
    name = str(format).removeprefix("torch.")
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {describe(format)}")
    return FORMATS[name]


def dtype_of(name: str) -> torch.dtype:
    """Returns the floating-point dtype with this name."""
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in dtypes:
        raise ValueError(f"dtype: expected one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]


def layers_of(what: What) -> tuple[LayerSpec, ...]:
    """Returns the layer specs of `what`. Of a module, these are its attention layers."""
    if isinstance(what, LayerSpec):
        return (what,)
    if isinstance(what, nn.Module):
        return layers_in(what)
    return what.layers if isinstance(what, ModelSpec) else tuple(what)


def cache_bytes(what: What, tokens: int, *, B: int = 1, format: AnyFormat = torch.float16) -> int:
    """Returns the bytes that the keys and values of `tokens` tokens need, without spare capacity.

    Layers with a window store at most the tokens of the window and the sinks. Linear layers store
    their states in float64 if the format is float64, else in float32.
    """
    stored, tokens = format_of(format), count("tokens", tokens)
    limits = [(layer, tokens if layer.most_kept is None else layer.most_kept) for layer in layers_of(what)]
    return B * sum(_bytes(layer, min(tokens, limit), stored) for layer, limit in limits)


def _bytes(layer: LayerSpec, tokens: int, stored: Format) -> int:
    """Returns the cache size in bytes of one layer, for one sample with `tokens` tokens."""
    token = sum(rows.heads * stored.row(rows.width) for rows in layer.kept)
    return tokens * token + layer.state * (8 if stored.name == "float64" else 4)


def allocated_bytes(
    what: What, tokens: int, *, B: int = 1, format: AnyFormat = torch.float16, capacity: int | None = None,
    page: int | None = None,
) -> int:  # fmt: skip
    """Returns the total `nbytes` of the `regard.cache` objects for `tokens` tokens of B samples.

    Layers with a window use a `SlidingCache`, latent layers a `LatentCache`, linear layers a
    `LinearCache`.

    Args:
        capacity: number of rows that each cache allocates. Default: the rows that a cache without a
            fixed capacity allocates when all tokens are appended in one call.
        page: page size in tokens. If given, the rows of caches without a window are rounded up to
            whole pages, as in a `PagedCache` with the fewest pages that hold all tokens.
    """
    stored, tokens = format_of(format), count("tokens", tokens)
    if capacity is not None and capacity < tokens:
        raise ValueError(f"capacity: expected at least the {tokens} tokens, got {capacity}")
    if capacity is not None and page is not None:
        raise ValueError(f"page: expected None with a capacity, got {page}")
    rows = capacity or (tokens and max(tokens, LEAST_ROWS))
    if page is not None:
        rows = -(-tokens // count("page", page, 1)) * page
    return B * sum(_bytes(layer, _rows(layer, rows), stored) for layer in layers_of(what))


def _rows(layer: LayerSpec, rows: int) -> int:
    """Returns the number of rows that a layer's cache allocates.

    This is `rows`, or the capacity of a `SlidingCache` if the layer has a window.
    """
    if not isinstance(layer, AttentionSpec) or layer.window is None:
        return rows
    return SlidingCache(1, 1, 1, window=layer.window, sinks=layer.sinks).capacity or 0
