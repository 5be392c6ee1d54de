"""Claim: multi-head attention is fully parallel, single-head attention is not.
`regard claims parallel_heads`

The rows of one head are independent of each other, so one head can be split into as many tasks as
it has rows. With more heads, the same number of multiplications is divided among the heads. The
experiment measures how many times as fast two threads are as one thread, for one head and for
eight heads of the same total width. If the claim were true, threads would hardly help one head. If
threads do not help eight heads either, no second CPU is free and the verdict is undecided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import regard
from regard.cost import best_times

from .finding import Finding, verdict

HEADS = 1, 2, 4, 8, 16


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def split(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits x (3, n, width) into q, k, v (heads, n, width / heads)."""
    q, k, v = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return q, k, v


def halves_apart(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Returns how much two calls, each for half of the queries, differ from one call for all."""
    parts = [regard.attention(half, k, v) for half in q.chunk(2, 1)]
    return float((torch.cat(parts, 1) - regard.attention(q, k, v)).abs().max())


def judge(one: float, many: float) -> str:
    """Returns the verdict from the gains by threads, for one head and for many heads."""
    if many < 1.3:
        return "undecided"
    return verdict(one - 1 < (many - 1) / 2)


def measure(n: int = 2048, width: int = 512, seconds: float = 3.0) -> Finding:
    x = torch.randn(3, n, width, generator=torch.Generator().manual_seed(0))
    cores = max(torch.get_num_threads(), 2)
    calls = {f"{heads}": partial(regard.attention, *split(x, heads)) for heads in HEADS}
    times = {}
    for count in (1, cores):
        with threads(count):
            times[count] = best_times(calls, seconds)
    gain = {heads: times[1][heads] / times[cores][heads] for heads in calls}
    apart = halves_apart(*split(x, 1))
    tasks = {heads: regard.plan(*split(x, int(heads))).tasks for heads in calls}
    return Finding(
        claim="multi-head is fully parallel, single-head is not",
        verdict=judge(gain["1"], gain["8"]),
        measured=f"{cores} threads are {gain['1']:.1f} times as fast as one thread for 1 head, "
        f"and {gain['8']:.1f} times as fast for 8 heads",
        correct=f"both are parallel: Regard splits one head of {n:,} rows into {tasks['1']} tasks, "
        f"whose results do not depend on the split (difference {apart:g}); "
        f"8 heads take {times[cores]['8'] / times[cores]['1']:.2f} times as long "
        "as one head of the same total width",
        numbers={
            "one head in two halves, apart": apart,
            "tasks by heads": tasks,
            **{
                f"milliseconds by heads, threads: {count}": {heads: 1e3 * t for heads, t in found.items()}
                for count, found in times.items()
            },
            f"{cores} threads beside one": gain,
        },
    )
