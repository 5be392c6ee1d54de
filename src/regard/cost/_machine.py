"""The limits of this machine, measured: multiply-adds, reading memory, and the least time of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from .. import _native
from .._attention import attention
from .._measuring import best_times


@dataclass(frozen=True)
class Machine:
    """Of so many threads together."""

    threads: int
    fma: float  # FLOP/s in float32
    read: float  # bytes/s from memory
    call: float  # seconds of the smallest call of `regard.attention`


def measure_machine(threads: int | None = None, *, repeats: int = 10, megabytes: int = 256) -> Machine:
    """The best of several looks, some seconds in all. The machine should have nothing else to do.

    Args:
        threads: default PyTorch's number.
        megabytes: what is read; several times what the processor's caches hold.
    """
    if (missing := _native.reason_unavailable()) is not None:
        raise RuntimeError(f"measure_machine: {missing}")
    threads = torch.get_num_threads() if threads is None else threads
    buffer = torch.ones(megabytes << 18)
    fma = max(fma_rate(threads) for _ in range(repeats))
    read = max(read_rate(buffer, threads) for _ in range(repeats))
    q = torch.zeros(1, 1, 1, 8)
    with torch.no_grad():
        call = best_times({"call": partial(attention, q, q, q)}, 0.0, least=100 * repeats)["call"]
    return Machine(threads, fma, read, call)


def fma_rate(threads: int, rounds: int = 5_000_000) -> float:
    return together(lambda _: _native.fma_probe(rounds), threads)


def read_rate(buffer: Tensor, threads: int) -> float:
    """Of a buffer in float32, a part for each thread."""
    part = buffer.numel() // threads

    def read(index: int) -> float:
        _native.read_probe(buffer[part * index : part * (index + 1)])
        return 4.0 * part

    return together(read, threads)


def together(work: Callable[[int], float], threads: int) -> float:
    """What the threads did in all, by second. The core releases the GIL."""
    barrier = threading.Barrier(threads)
    done: list[tuple[float, float, float]] = []

    def run(index: int) -> None:
        barrier.wait()
        begin = perf_counter()
        amount = float(work(index))
        done.append((begin, perf_counter(), amount))

    workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    begins, ends, amounts = zip(*done, strict=True)
    return float(sum(amounts) / (max(ends) - min(begins)))
