"""Caches of each kind, common ways to fill them, and the expected attention over all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from regard import cache as C, masks as M
from regard._call.stored import decode, encode

H, Hkv, D, Dv = 6, 3, 37, 11  # a latent has one head, and its first Dv channels are the values
WINDOW, SINKS, PAGE = 7, 3, 16
SCALE = 0.3
KINDS = ("growing", "fixed", "sliding", "streaming", "paged", "int8", "int4", "latent")
EXACT = tuple(kind for kind in KINDS if not kind.startswith("int"))

Cache = Any  # the caches share method names, not a base class


def new(kind: str, B: int = 2, dtype: torch.dtype = torch.float32, capacity: int = 96) -> Cache:
    if kind == "latent":
        return C.LatentCache(B, Dv, D - Dv, capacity=capacity, dtype=dtype)
    if kind == "paged":
        cache = C.PagedCache(B * -(-capacity // PAGE), Hkv, D, Dv, page=PAGE, dtype=dtype)
        for _ in range(B):
            cache.add()
        return cache
    if kind in ("sliding", "streaming"):
        sinks = SINKS if kind == "streaming" else 0
        return C.SlidingCache(B, Hkv, D, Dv, window=WINDOW, sinks=sinks, rollback=2, dtype=dtype)
    if kind in ("int8", "int4"):
        return C.QuantizedCache(B, Hkv, D, Dv, bits=int(kind[3:]), capacity=capacity, dtype=dtype)
    return C.KVCache(B, Hkv, D, Dv, capacity=capacity if kind == "fixed" else None, dtype=dtype)


def tokens(kind: str, B: int, N: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random q (B, H, N, D), k (B, Hkv, N, D) and v (B, Hkv, N, Dv)."""
    q = torch.randn(B, H, N, D, dtype=dtype)
    if kind == "latent":
        k = torch.randn(B, 1, N, D, dtype=dtype)
        return q, k, k[..., :Dv]
    return q, torch.randn(B, Hkv, N, D, dtype=dtype), torch.randn(B, Hkv, N, Dv, dtype=dtype)


def append(cache: Cache, k: Tensor, v: Tensor, **options: Any) -> None:
    new = (k[:, 0],) if isinstance(cache, C.LatentCache) else (k, v)
    cache.append(*new, **options)


def attend(cache: Cache, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    new = (k[:, 0],) if isinstance(cache, C.LatentCache) else (k, v)
    return cache.attend(q, *new, **({"scale": SCALE} | options))


def as_stored(kind: str, x: Tensor) -> Tensor:
    """Returns x after the rounding of the cache's storage."""
    if not kind.startswith("int"):
        return x
    return decode(*encode(x, kind), kind, x.shape[-1]).to(x.dtype)


def mask_of(kind: str) -> M.Mask:
    if kind == "sliding":
        return M.sliding(WINDOW)
    return M.Causal() & (M.Window(WINDOW - 1, 0) | M.Prefix(SINKS)) if kind == "streaming" else M.Causal()


def expected(kind: str, q: Tensor, k: Tensor, v: Tensor, mask: M.Mask | None = None, **options: Any) -> Any:
    """Returns attention over all tokens at once, in float64."""
    k, v = (as_stored(kind, x).double() for x in (k, v))
    cache_mask = mask_of(kind) if mask is None else mask_of(kind) & mask
    return regard.attention(q.double(), k, v, mask=cache_mask, **({"scale": SCALE} | options))
