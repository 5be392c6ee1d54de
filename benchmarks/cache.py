"""Times decode steps of caches, and computes how much time a cache adds to the attention call.

`python benchmarks/cache.py` appends tokens one by one and prints for each cache, in microseconds
per step:
- first: `cache.attend` in the first round of steps;
- attend: `cache.attend` in later rounds;
- stored: `attend_stored`, which `cache.attend` calls, on the same storage at the same lengths;
- overhead: attend - stored.

A second table times one step with long caches: 32 heads of 128 channels, 8192 tokens, in 16, 8 and
4 bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from measure import best_times, cpu_name
from rich.console import Console
from rich.table import Table
from steps import CACHES, HELD, LONG_CACHES, LONG_HEADS, LONG_HELD, STEPS, Generation, paged

from regard._api.stored import attend_stored
from regard._call.spec import Options

COLUMNS = ("first", "attend", "stored", "overhead")


def measure(make: Callable[..., Any], seconds: float) -> dict[str, float]:
    """Returns a dict from each column of the table to its microseconds per decode step."""
    generation = Generation(make())
    cache, q, scale = generation.cache, generation.q, generation.scale
    views = [cache._content.storage.stored(HELD + i + 1) for i in range(STEPS)]
    mask = cache._keeps.visible

    def stored() -> None:
        for view in views:
            attend_stored(q, view, Options(mask=mask, scale=scale))

    begin = perf_counter()
    generation.run()
    times = {"first": perf_counter() - begin}
    times |= best_times({"attend": generation.run, "stored": stored}, seconds)
    times["overhead"] = times["attend"] - times["stored"]
    return {name: 1e6 * time / STEPS for name, time in times.items()}


def reading(seconds: float) -> dict[str, tuple[float, int]]:
    """Returns the seconds of a decode step with each long cache, and the bytes of the cache."""
    long = {name: Generation(make(), LONG_HEADS, LONG_HELD, 1) for name, make in LONG_CACHES.items()}
    times = best_times({name: generation.run for name, generation in long.items()}, seconds)
    return {name: (times[name], generation.cache.nbytes) for name, generation in long.items()}


def reading_table(seconds: float, threads: int) -> Table:
    torch.set_num_threads(threads)
    table = Table("32 heads, 8192 tokens", "ms", "GB/s", "speedup", title=f"threads: {threads}")
    steps = reading(seconds)
    baseline, _ = steps["bfloat16"]
    for name, (time, size) in steps.items():
        table.add_row(name, f"{1e3 * time:.2f}", f"{size / time / 1e9:.1f}", f"{baseline / time:.2f} x")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="per cache")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("us", *COLUMNS, title=f"{cpu_name()}, threads: {options.threads}")
    with torch.no_grad():
        for name, make in CACHES.items():
            if make is not paged:  # paged storage has no views of earlier lengths
                times = measure(make, options.seconds)
                table.add_row(name, *(f"{times[column]:.1f}" for column in COLUMNS))
        Console().print(table, reading_table(options.seconds, 2))


if __name__ == "__main__":
    main()
