"""The limits of this machine, measured: multiply-adds, reading memory, and the least time of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from threading import Barrier
from time import perf_counter

import torch
from torch import Tensor

from .._api.attention import attention
from .._backends.native import core
from .._tools.measuring import best_times

SIZES = tuple(megabytes << 20 for megabytes in (4, 16, 32, 64, 256))
LEAST_READ = 64 << 20  # or starting the threads would count
SMALL_CALLS = 100
SHORT_LOOK = 500_000  # rounds, under a millisecond: some look is not disturbed, even on a busy machine


@dataclass(frozen=True)
class Machine:
    """Of so many threads together."""

    threads: int
    fma: float  # FLOP/s in float32
    # (bytes read again and again, bytes/s), ascending: caches, then memory
    read: tuple[tuple[int, float], ...]
    call: float  # seconds of the smallest call of `regard.attention`

    def seconds_to_read(self, size: int) -> float:
        """Of so many bytes, by a line between the measured sizes on a logarithmic scale."""
        for (a, quick), (b, slower) in pairwise(self.read):
            if a <= size < b:
                share = math.log(size / a) / math.log(b / a)
                return size * ((1 - share) / quick + share / slower)
        return size / self.read[0 if size < self.read[0][0] else -1][1]


def measure_machine(
    threads: int | None = None, *, repeats: int = 10, sizes: Sequence[int] = SIZES
) -> Machine:
    """The best of several looks, some seconds in all. The machine should have nothing else to do.

    Args:
        threads: default PyTorch's number.
        sizes: bytes that are read, ascending: from what a cache holds to several times that.
    """
    if (missing := core.reason_unavailable()) is not None:
        raise RuntimeError(f"measure_machine: {missing}")
    threads = torch.get_num_threads() if threads is None else threads
    buffer = torch.ones(max(sizes) // 4)
    fma = max(fma_rate(threads, SHORT_LOOK) for _ in range(10 * repeats))
    read = tuple((n, max(read_rate(buffer[: n // 4], threads) for _ in range(repeats))) for n in sizes)
    with torch.no_grad():
        call = best_times({"calls": small_calls}, 0.0, least=repeats)["calls"] / SMALL_CALLS
    return Machine(threads, fma, read, call)


def small_calls() -> None:
    """Many in a row, or the clock would count."""
    q = torch.zeros(1, 1, 1, 8)
    for _ in range(SMALL_CALLS):
        attention(q, q, q)


def fma_rate(threads: int, rounds: int = 5_000_000) -> float:
    return together(lambda _: core.fma_probe(rounds), threads)


def read_rate(buffer: Tensor, threads: int) -> float:
    """Of a buffer in float32, a part for each thread, again and again if it is small."""
    part, rounds = buffer.numel() // threads, max(1, LEAST_READ // buffer.nbytes)

    def read(index: int) -> float:
        for _ in range(rounds):
            core.read_probe(buffer[part * index : part * (index + 1)])
        return 4.0 * part * rounds

    return together(read, threads)


def together(work: Callable[[int], float], threads: int) -> float:
    """What the threads did in all, by second. The core releases the GIL."""
    barrier = Barrier(threads)

    def run(index: int) -> tuple[float, float, float]:
        barrier.wait()
        begin = perf_counter()
        amount = float(work(index))
        return begin, perf_counter(), amount

    with ThreadPoolExecutor(threads) as pool:
        begins, ends, amounts = zip(*pool.map(run, range(threads)), strict=True)
    return float(sum(amounts) / (max(ends) - min(begins)))
