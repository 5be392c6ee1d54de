"""Measures this machine's limits: FLOP/s, read bandwidth, and the time of the smallest call."""

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
LEAST_READ = 64 << 20  # bytes per measurement; with fewer, the time to start the threads would count too much
SMALL_CALLS = 100
SHORT_PROBE = 500_000  # rounds of a probe, under a millisecond, so that some probes run undisturbed


@dataclass(frozen=True)
class Machine:
    """The speed limits of a machine, measured with all `threads` threads running."""

    threads: int
    fma: float  # float32 FLOP/s of fused multiply-adds
    read: tuple[tuple[int, float], ...]  # (bytes of a buffer, bytes/s when it is read repeatedly), ascending
    call: float  # seconds of the smallest call of `regard.attention`

    def seconds_to_read(self, size: int) -> float:
        """Returns the seconds to read `size` bytes.

        Interpolates between the measured sizes, linearly in the logarithm of the size.
        """
        for (a, rate_a), (b, rate_b) in pairwise(self.read):
            if a <= size < b:
                share = math.log(size / a) / math.log(b / a)
                return size * ((1 - share) / rate_a + share / rate_b)
        return size / self.read[0 if size < self.read[0][0] else -1][1]


def measure_machine(
    threads: int | None = None, *, repeats: int = 10, sizes: Sequence[int] = SIZES
) -> Machine:
    """Measures this machine in a few seconds. Each number is the best of several repeats.

    If other processes run, the measured rates are too low.

    Args:
        threads: number of threads. Default: PyTorch's number of threads.
        repeats: number of repeats of each measurement.
        sizes: buffer sizes in bytes, ascending. They should range from a size that fits into a CPU
            cache to a size several times larger than the cache.
    """
    if (missing := core.reason_unavailable()) is not None:
        raise RuntimeError(f"measure_machine: {missing}")
    threads = torch.get_num_threads() if threads is None else threads
    buffer = torch.ones(max(sizes) // 4)
    fma = max(fma_rate(threads, SHORT_PROBE) for _ in range(10 * repeats))
    read = tuple((n, max(read_rate(buffer[: n // 4], threads) for _ in range(repeats))) for n in sizes)
    with torch.no_grad():
        call = best_times({"calls": small_calls}, 0.0, least=repeats)["calls"] / SMALL_CALLS
    return Machine(threads, fma, read, call)


def small_calls() -> None:
    """Runs the smallest call `SMALL_CALLS` times, so that the clock's resolution is irrelevant."""
    q = torch.zeros(1, 1, 1, 8)
    for _ in range(SMALL_CALLS):
        attention(q, q, q)


def fma_rate(threads: int, rounds: int = 5_000_000) -> float:
    """Returns the total FLOP/s of fused multiply-adds on `threads` threads."""
    return together(lambda _: core.fma_probe(rounds), threads)


def read_rate(buffer: Tensor, threads: int) -> float:
    """Returns the total bytes/s at which `threads` threads read a float32 buffer.

    Each thread reads its part of the buffer. Small buffers are read repeatedly.
    """
    part, rounds = buffer.numel() // threads, max(1, LEAST_READ // buffer.nbytes)

    def read(index: int) -> float:
        for _ in range(rounds):
            core.read_probe(buffer[part * index : part * (index + 1)])
        return 4.0 * part * rounds

    return together(read, threads)


def together(work: Callable[[int], float], threads: int) -> float:
    """Runs `work(index)` on each thread and returns the amount of work per second.

    `work` returns how much it did, for example in FLOPs or bytes. The sum over all threads is
    divided by the elapsed time. `work` must release the GIL, as the core's probes do.
    """
    barrier = Barrier(threads)

    def run(index: int) -> tuple[float, float, float]:
        barrier.wait()
        begin = perf_counter()
        amount = float(work(index))
        return begin, perf_counter(), amount

    with ThreadPoolExecutor(threads) as pool:
        begins, ends, amounts = zip(*pool.map(run, range(threads)), strict=True)
    return float(sum(amounts) / (max(ends) - min(begins)))
