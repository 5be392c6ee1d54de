"""Attention over the keys in a cache: builds the mask and the offset of the call.

All caches except `LinearCache` use `attend`. Only the fast path of `RowCache` calls `attend_stored`
directly.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from .._api.stored import attend_stored
from .._call.spec import Bias, Options, fast_new
from .._call.stored import Stored
from .._tools.arguments import count, describe
from ..masks import Causal, Dense, Mask, Window
from ._checks import Chunk, Lengths
from ._counts import Count, as_tensor, minus

Result = Tensor | tuple[Tensor, Tensor]  # out, or (out, LSE)

CAUSAL = Causal()


class CacheOptions(NamedTuple):
    """The options of `attend`: those of `attention` as an `Options`, plus `window` and `impl`."""

    options: Options
    window: int | None
    impl: str


class AttendKeywords(TypedDict, total=False):
    """The keyword arguments of `attend` that all caches except `LinearCache` share.

    `KVCache.attend` explains them.
    """

    lengths: Lengths
    mask: Mask | Tensor | None
    bias: Bias | None
    softcap: float | None
    sink: Tensor | None
    window: int | None
    impl: str


class ScaledKeywords(AttendKeywords, total=False):
    """The keyword arguments of `attend` in caches whose `scale` is optional."""

    scale: float | None


def attend(
    q: Tensor, stored: Stored, held: Count, chunk: Chunk, settings: CacheOptions, base: Mask | None = None
) -> Result:
    """Computes attention of q (B, Hq, Lq, D) over the stored keys.

    Sample b has held[b] stored tokens, and the queries belong to the last Lq of them. If the chunk
    of new tokens has padding, query i belongs to token i of the chunk instead, and the output of
    padding is zero (LSE -inf). `base` is the cache's mask. The default is a causal mask.
    """
    options, window, impl = settings
    Lq = q.shape[2]
    offset = _offset(held, stored.length, chunk, Lq, q.device)
    if base is None and (Lq > 1 or offset is not None):
        base = CAUSAL
    options = fast_new(Options, (_combined_mask(base, window, options.mask), offset, *options[2:]))
    result = attend_stored(q, stored, options, impl)
    return result if isinstance(chunk.new, int) else _zero_padding(result, chunk)


def _offset(held: Count, Lk: int, chunk: Chunk, Lq: int, device: torch.device) -> int | Tensor | None:
    """Returns the position of query 0, or None for the default, Lk - Lq."""
    if isinstance(held, int) and isinstance(chunk.new, int):
        return None if held == Lk else held - Lq
    last = Lq if isinstance(chunk.new, int) else chunk.new
    B = len(held) if isinstance(held, tuple) else len(chunk.new)  # type: ignore[arg-type]
    return as_tensor(minus(held, last), B, device)


def _zero_padding(result: Result, chunk: Chunk) -> Result:
    """Sets the output of padding to 0 and its LSE to -inf."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    real = torch.tensor(chunk.new, device=out.device)
    padding = (torch.arange(chunk.L, device=out.device) >= real[:, None])[:, None]  # (B, 1, L)
    out = out.masked_fill(padding[..., None], 0)
    return out if lse is None else (out, lse.masked_fill(padding, -torch.inf))


def _combined_mask(base: Mask | None, window: int | None, mask: Mask | Tensor | None) -> Mask | None:
    """Combines the cache's mask with the options `window` and `mask`."""
    if window is not None:
        recent = _window(window)
        base = recent if base is None or base is CAUSAL else base & recent
    if mask is None:
        return base
    return _as_mask(mask) if base is None else base & _as_mask(mask)


def _as_mask(mask: Any) -> Mask:
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        raise TypeError(f"mask: expected a Mask or a bool tensor, True = may attend, got {describe(mask)}")
    return Dense(mask)


@functools.lru_cache(maxsize=64)
def _window(window: int) -> Mask:
    """Returns a mask of the `window` keys that end with the query's own."""
    return Window(count("window", window, 1) - 1, 0)
