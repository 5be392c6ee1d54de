"""Measures the times of several calls, and the peak memory of one call."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt parameters
SMALL, LARGE = 2**16, 2**25


def best_times(calls: Mapping[str, Callable[[], Any]], seconds: float, least: int = 3) -> dict[str, float]:
    """Returns the shortest time of each call, in seconds.

    Repeats all calls for `seconds` in total, and each at least `least` times. The calls take turns,
    so that a slow phase of the machine affects all of them.
    """
    best = dict.fromkeys(calls, float("inf"))
    end, rounds = perf_counter() + seconds, 0
    while rounds < least or perf_counter() < end:
        for name, call in calls.items():
            begin = perf_counter()
            call()
            best[name] = min(best[name], perf_counter() - begin)
        rounds += 1
    return best


def peak_memory(run: Callable[[], Any]) -> int | None:
    """Measures the peak memory of a call in bytes, beyond the memory in use before it (Linux).

    The call runs in a new thread, because the core keeps scratch memory for each calling thread.
    The first call of a kind also loads code and starts threads, so use the second measurement. On
    systems that do not report the peak memory of a process, returns None without running the call.
    """
    if not os.access(REFS, os.W_OK):
        return None
    with _freed_at_once(), ThreadPoolExecutor(1) as thread:
        return thread.submit(_extra, run).result()


def _extra(run: Callable[[], Any]) -> int:
    gc.collect(1)  # frees garbage of the last call; collecting all generations takes longer than most calls
    ctypes.CDLL(None).malloc_trim(0)
    REFS.write_text("5")  # resets VmHWM, the peak memory of the process
    before = _status("VmRSS")
    result = run()
    peak = _status("VmHWM")
    del result
    return max(peak - before, 0)


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """Makes malloc return freed blocks to the system at once, within a `with` block.

    Otherwise a call could reuse blocks that were freed before, and its peak would appear too low.
    """
    set_option = ctypes.CDLL(None).mallopt
    set_option(MMAP_THRESHOLD, SMALL)
    set_option(TRIM_THRESHOLD, SMALL)
    try:
        yield
    finally:
        # mallopt turns off glibc's dynamic thresholds. Freeing large blocks would raise them to LARGE.
        set_option(MMAP_THRESHOLD, LARGE)
        set_option(TRIM_THRESHOLD, 2 * LARGE)


def _status(name: str) -> int:
    """Reads a memory size, such as VmRSS, from /proc/self/status. Returns bytes."""
    line = next(s for s in STATUS.read_text(encoding="ascii").splitlines() if s.startswith(name + ":"))
    return 1024 * int(line.split()[1])
