"""Decode steps of caches, one token at a time. Uses only public names of `regard`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from checks import TOLERANCE, WrongResult, row_error
from torch import Tensor

import regard
from regard.cache import KVCache, LatentCache, PagedCache, QuantizedCache, SlidingCache

HEADS, HELD = 8, 64
STEPS = 20  # steps per round; short, so that some rounds run without interruption
LONG_HEADS, LONG_HELD = 32, 8191
BITS_TOLERANCE = {8: 0.03, 4: 0.3}  # bits -> largest error of a row divided by the mean norm


def paged() -> PagedCache:
    """Returns a paged cache with one sequence."""
    cache = PagedCache(32, 2, 64)
    cache.add()
    return cache


long_codes = partial(QuantizedCache, 1, LONG_HEADS, 128, capacity=LONG_HELD + 1, dtype=torch.bfloat16)

CACHES: dict[str, Callable[[], Any]] = {
    "KVCache": partial(KVCache, 1, 2, 64, capacity=512),
    "SlidingCache": partial(SlidingCache, 1, 2, 64, window=256, sinks=4),
    "QuantizedCache, 8 bits": partial(QuantizedCache, 1, 2, 64, capacity=512),
    "QuantizedCache, 4 bits": partial(QuantizedCache, 1, 2, 64, bits=4, capacity=512),
    "LatentCache": partial(LatentCache, 1, 48, 16, capacity=512),
    "PagedCache": paged,
}
LONG_CACHES: dict[str, Callable[[], Any]] = {
    "bfloat16": partial(KVCache, 1, LONG_HEADS, 128, capacity=LONG_HELD + 1, dtype=torch.bfloat16),
    "8 bits": partial(long_codes, bits=8),
    "4 bits": partial(long_codes, bits=4),
}


class Generation:
    """A cache with a prompt, and decode steps that all use the same query and token."""

    def __init__(self, cache: Any, heads: int = HEADS, held: int = HELD, steps: int = STEPS) -> None:
        self.cache, self.held, self.steps = cache, held, steps
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(1, heads, 1, cache.D, generator=generator).to(cache.dtype)
        self.scale = cache.D**-0.5
        self.prompt, self.token = (self._tokens(L, generator) for L in (held, 1))
        cache.append(*self.prompt)

    def _tokens(self, L: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Returns random latents (1, L, D), or keys and values (1, Hkv, L, D)."""
        latent = isinstance(self.cache, LatentCache)
        shape = (1, L, self.cache.D) if latent else (1, self.cache.Hkv, L, self.cache.D)
        return tuple(torch.randn(shape, generator=generator).to(self.cache.dtype) for _ in range(2 - latent))

    def run(self) -> Tensor:
        """Crops the cache to the prompt, runs all steps, and returns the last output (1, H, 1, Dv)."""
        self.cache.crop(self.held)
        for _ in range(self.steps):
            out = self.cache.attend(self.q, *self.token, scale=self.scale)
        return out

    def check(self, out: Tensor) -> None:
        """Compares the result of `run` with float64. Raises WrongResult if the error is too large."""
        k, *values = (
            torch.cat([prompt, *[token] * self.steps], -2).double()
            for prompt, token in zip(self.prompt, self.token, strict=True)
        )
        k, v = (k, values[0]) if values else (k[:, None], k[:, None, :, : self.cache.rank])
        exact = regard.attention(self.q.double(), k, v, scale=self.scale, impl="reference")
        error, bits = row_error(out, exact), getattr(self.cache, "bits", None)
        if not error < (BITS_TOLERANCE[bits] if bits else TOLERANCE[self.cache.dtype]):
            raise WrongResult(f"{type(self.cache).__name__}: error {error:.1e} against float64")
