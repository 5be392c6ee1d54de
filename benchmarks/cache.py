"""What a step of a cache costs beyond the attention in it.

`python benchmarks/cache.py` appends tokens one by one and prints for each cache, in microseconds a step:
- first: `cache.attend` at lengths that were never seen before;
- attend: `cache.attend` once they were;
- stored: the function that it calls, over the same storage at the same lengths;
- more: attend - stored, what the cache itself takes.

Then what reading long caches costs: one query, 32 heads of 128 channels, 8192 tokens, in 16, 8 and 4 bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from measure import best_times, cpu_name
from rich.console import Console
from rich.table import Table
from torch import Tensor

from regard._api.stored import attend_stored
from regard._call.spec import Options
from regard.cache import KVCache, LatentCache, QuantizedCache, SlidingCache

H, Hkv, D, HELD = 8, 2, 64, 64
STEPS = 20  # few, so that some rounds are not interrupted
COLUMNS = ("first", "attend", "stored", "more")
CACHES: dict[str, Callable[..., Any]] = {
    "KVCache": partial(KVCache, 1, Hkv, D, capacity=512),
    "SlidingCache": partial(SlidingCache, 1, Hkv, D, window=256, sinks=4),
    "QuantizedCache, 8 bits": partial(QuantizedCache, 1, Hkv, D, capacity=512),
    "LatentCache": partial(LatentCache, 1, D - 16, 16, capacity=512),
}


def new_tokens(cache: Any, L: int) -> tuple[Tensor, ...]:
    if isinstance(cache, LatentCache):
        return (torch.randn(1, L, D),)
    return torch.randn(1, Hkv, L, D), torch.randn(1, Hkv, L, D)


def measure(make: Callable[..., Any], seconds: float) -> dict[str, float]:
    """Microseconds of a step."""
    cache, q = make(), torch.randn(1, H, 1, D)
    new, scale, mask = new_tokens(cache, 1), D**-0.5, getattr(cache, "_shown", None)
    cache.append(*new_tokens(cache, HELD))
    rows = [cache._stored(cache._parts, HELD + i + 1) for i in range(STEPS)]

    def attend() -> None:
        cache.crop(HELD)
        for _ in range(STEPS):
            cache.attend(q, *new, scale=scale)

    def stored() -> None:
        for store in rows:
            attend_stored(q, store, Options(mask=mask, scale=scale))

    begin = perf_counter()
    attend()
    times = {"first": perf_counter() - begin}
    times |= best_times({"attend": attend, "stored": stored}, seconds)
    times["more"] = times["attend"] - times["stored"]
    return {name: 1e6 * time / STEPS for name, time in times.items()}


def reading(seconds: float, Lk: int = 8192) -> dict[str, tuple[float, int]]:
    """Seconds of a step of a long cache, and its bytes."""
    k, v, q = (torch.randn(1, 32, n, 128, dtype=torch.bfloat16) for n in (Lk, Lk, 1))
    caches = {
        "bfloat16": KVCache(1, 32, 128, capacity=Lk, dtype=torch.bfloat16),
        "8 bits": QuantizedCache(1, 32, 128, bits=8, capacity=Lk, dtype=torch.bfloat16),
        "4 bits": QuantizedCache(1, 32, 128, bits=4, capacity=Lk, dtype=torch.bfloat16),
    }
    for cache in caches.values():
        cache.append(k, v)
    times = best_times({name: partial(cache.attend, q) for name, cache in caches.items()}, seconds)
    return {name: (times[name], cache.nbytes) for name, cache in caches.items()}


def reading_table(seconds: float, threads: int) -> Table:
    torch.set_num_threads(threads)
    table = Table("32 heads, 8192 tokens", "ms", "GB/s", "faster", title=f"threads: {threads}")
    found = reading(seconds)
    first, _ = found["bfloat16"]
    for name, (time, size) in found.items():
        table.add_row(name, f"{1e3 * time:.2f}", f"{size / time / 1e9:.1f}", f"{first / time:.2f} x")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each cache")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("us", *COLUMNS, title=f"{cpu_name()}, threads: {options.threads}")
    with torch.no_grad():
        for name, make in CACHES.items():
            found = measure(make, options.seconds)
            table.add_row(name, *(f"{found[column]:.1f}" for column in COLUMNS))
        Console().print(table, reading_table(options.seconds, 2))


if __name__ == "__main__":
    main()
