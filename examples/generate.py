"""Generates text with each cache and compares tokens per second, memory and the text.

The model is the decoder of train_decoder.py. Each exact cache must generate the same text as
attention without a cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import regard
from regard import masks as M
from regard.cache import KVCache, LatentCache, PagedCache, QuantizedCache, SlidingCache

from train_decoder import Decoder, batches, step  # isort: skip

WINDOW, SINKS = 64, 4
FULL, STREAMING = M.Causal(), M.streaming(WINDOW, SINKS)
HEADS, LAYERS, SIZE = 8, 2, 32  # heads, layers and head size of the decoder; d = 256


def paged(B: int, Hkv: int, D: int) -> PagedCache:
    cache = PagedCache(B * 32, Hkv, D)
    for _ in range(B):
        cache.add()
    return cache


class Joined(LatentCache):
    """A latent cache at full rank: the latent holds the keys and values of all heads."""

    def __init__(self, B: int, Hkv: int, D: int) -> None:
        super().__init__(B, 2 * Hkv * D, 0, capacity=512)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        B, H, L, D = q.shape
        latent = torch.cat([k, v], 1).transpose(1, 2).flatten(2)  # (B, L, 2 * H * D)
        wide = q.new_zeros(B, H, L, 2 * H, D)
        heads = torch.arange(H)
        wide[:, heads, :, heads] = q.transpose(0, 1)  # zeros for the keys of other heads
        out = super().attend(wide.flatten(3), latent, scale=D**-0.5).unflatten(3, (2 * H, D))
        return out[:, heads, :, H + heads].transpose(0, 1)


EXACT: dict[str, tuple[Callable[..., Any], M.Mask]] = {
    "KVCache, grows": (KVCache, FULL),
    "KVCache, preallocated": (partial(KVCache, capacity=512), FULL),
    "PagedCache": (paged, FULL),
    "LatentCache, full rank": (Joined, FULL),
    f"SlidingCache, {WINDOW} + {SINKS}": (partial(SlidingCache, window=WINDOW, sinks=SINKS), STREAMING),
}
QUANTIZED: dict[str, tuple[Callable[..., Any], M.Mask]] = {
    "QuantizedCache, 8 bits": (partial(QuantizedCache, capacity=512), FULL),
    "QuantizedCache, 4 bits": (partial(QuantizedCache, bits=4, capacity=512), FULL),
}


class Written(NamedTuple):
    text: Tensor  # (B, tokens) bytes
    seconds: float
    memory: int  # bytes of all caches


def trained(steps: int, length: int) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(length, HEADS * SIZE, HEADS, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in track(batches(steps, length), "training"):
        step(model, optimizer, batch, partial(regard.attention, mask=FULL))
    return model


def last_scores(model: Decoder, text: Tensor, start: int, attends: list[Callable[..., Any]]) -> Tensor:
    """Returns the logits (B, 256) of the byte after `text` (B, L).

    `start` is the position of the first byte of `text`.
    """
    x = model.byte(text) + model.place.weight[start : start + text.shape[1]]
    for block, attend in zip(model.blocks, attends, strict=True):
        x = block(x, attend)
    scores: Tensor = model.head(model.norm(x[:, -1]))
    return scores


def without_cache(model: Decoder, prompt: Tensor, count: int, mask: M.Mask) -> Written:
    """Generates without a cache: every token recomputes attention over all previous tokens."""
    text, began = prompt, time.perf_counter()
    for _ in range(count):
        scores = last_scores(model, text, 0, [partial(regard.attention, mask=mask)] * LAYERS)
        text = torch.cat([text, scores.argmax(-1, keepdim=True)], 1)
    return Written(text[:, prompt.shape[1] :], time.perf_counter() - began, 0)


def with_caches(model: Decoder, prompt: Tensor, count: int, make: Callable[..., Any]) -> Written:
    """Generates with caches: one call for the prompt, then one call per token."""
    caches = [make(len(prompt), HEADS, SIZE) for _ in range(LAYERS)]
    new, start, written, began = prompt, 0, [], time.perf_counter()
    for _ in range(count):
        scores = last_scores(model, new, start, [cache.attend for cache in caches])
        start, new = start + new.shape[1], scores.argmax(-1, keepdim=True)
        written.append(new)
    seconds = time.perf_counter() - began
    return Written(torch.cat(written, 1), seconds, sum(cache.nbytes for cache in caches))


@torch.no_grad()
def compare(model: Decoder, prompt: Tensor, count: int) -> tuple[Table, bool]:
    """Returns a table of all caches, and whether every exact cache generates the right text.

    The right text is the one that attention without a cache generates.
    """
    full = {mask: without_cache(model, prompt, count, mask) for mask in (FULL, STREAMING)}
    table = Table("cache", "tokens/s", "KiB", "text of full attention")
    total, right = prompt.shape[0] * count, True
    for name, mask in (("none", FULL), (f"none, window {WINDOW} + {SINKS}", STREAMING)):
        table.add_row(name, f"{total / full[mask].seconds:.0f}", "-", "reference")
    for name, (make, mask) in track((EXACT | QUANTIZED).items(), "generating"):
        written = with_caches(model, prompt, count, make)
        equal = (written.text == full[mask].text).float().mean().item()
        right &= equal == 1 or name in QUANTIZED
        verdict = "identical" if equal == 1 else f"{equal:.0%} of the bytes"
        table.add_row(name, f"{total / written.seconds:.0f}", f"{written.memory / 1024:.0f}", verdict)
    return table, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--tokens", type=int, default=192, help="tokens to generate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="5 steps, 100 tokens, for a smoke test")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps, count = (5, 100) if options.quick else (options.steps, options.tokens)
    model = trained(steps, length=384)
    prompt = torch.cat([batch[:, :64] for batch in batches(2, 64)])
    table, right = compare(model, prompt, count)
    Console().print(table)
    print("Exact caches wrote the same text." if right else "An exact cache wrote a different text.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
