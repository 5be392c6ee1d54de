"""Attention over what a cache stores: which keys its queries see, and at which offset they stand.

All caches attend through `attend`; a repeated step of a cache of rows calls `attend_stored` itself.
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
    """The options of `attend`."""

    options: Options
    window: int | None
    impl: str


class AttendKeywords(TypedDict, total=False):
    """The options of `attend` that all caches share, for its overloads. `KVCache.attend` describes them."""

    lengths: Lengths
    mask: Mask | Tensor | None
    bias: Bias | None
    softcap: float | None
    sink: Tensor | None
    window: int | None
    impl: str


class ScaledKeywords(AttendKeywords, total=False):
    """Those of caches in which the scale has a default."""

    scale: float | None


def attend(
    q: Tensor, stored: Stored, held: Count, chunk: Chunk, asked: CacheOptions, base: Mask | None = None
) -> Result:
    """Attends from q (B, Hq, Lq, D), the last Lq of `held` tokens, to the keys that `base` allows.

    The default of `base` is causal. After a chunk with padding, q is aligned with the chunk, and rows of
    padding give zeros (LSE -inf).
    """
    options, window, impl = asked
    Lq = q.shape[2]
    offset = _offset(held, stored.length, chunk, Lq, q.device)
    if base is None and (Lq > 1 or offset is not None):
        base = CAUSAL
    options = fast_new(Options, (_visible(base, window, options.mask), offset, *options[2:]))
    result = attend_stored(q, stored, options, impl)
    return result if isinstance(chunk.new, int) else _without_padding(result, chunk)


def _offset(held: Count, Lk: int, chunk: Chunk, Lq: int, device: torch.device) -> int | Tensor | None:
    """Returns the position of query 0; None if the last query meets the last key."""
    if isinstance(held, int) and isinstance(chunk.new, int):
        return None if held == Lk else held - Lq
    last = Lq if isinstance(chunk.new, int) else chunk.new
    B = len(held) if isinstance(held, tuple) else len(chunk.new)  # type: ignore[arg-type]
    return as_tensor(minus(held, last), B, device)


def _without_padding(result: Result, chunk: Chunk) -> Result:
    out, lse = result if isinstance(result, tuple) else (result, None)
    real = torch.tensor(chunk.new, device=out.device)
    padding = (torch.arange(chunk.L, device=out.device) >= real[:, None])[:, None]  # (B, 1, L)
    out = out.masked_fill(padding[..., None], 0)
    return out if lse is None else (out, lse.masked_fill(padding, -torch.inf))


def _visible(base: Mask | None, window: int | None, mask: Mask | Tensor | None) -> Mask | None:
    """Narrows a base by the options `window` and `mask`."""
    if window is not None:
        recent = _window(window)
        base = recent if base is None or base is CAUSAL else base & recent
    if mask is None:
        return base
    return _as_mask(mask) if base is None else base & _as_mask(mask)


def _as_mask(given: Any) -> Mask:
    if isinstance(given, Mask):
        return given
    if not isinstance(given, Tensor) or given.dtype is not torch.bool:
        raise TypeError(f"mask: expected a Mask or a bool tensor, True = may attend, got {describe(given)}")
    return Dense(torch.atleast_2d(given))


@functools.lru_cache(maxsize=64)
def _window(window: int) -> Mask:
    """Returns the mask of the last `window` keys, the query's own included."""
    return Window(count("window", window, 1) - 1)
