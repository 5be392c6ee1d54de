"""The time of calls, fair to all of them, and the peak memory of one, as the system sees it (Linux)."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the names of mallopt
SMALL, LARGE = 2**16, 2**25


def best_times(calls: Mapping[str, Callable[[], Any]], seconds: float, least: int = 3) -> dict[str, float]:
    """The shortest time of each call in seconds. They take turns, so that a slow spell meets all of them."""
    best = dict.fromkeys(calls, float("inf"))
    end, rounds = perf_counter() + seconds, 0
    while rounds < least or perf_counter() < end:
        for name, call in calls.items():
            begin = perf_counter()
            call()
            best[name] = min(best[name], perf_counter() - begin)
        rounds += 1
    return best


# Memory


def available() -> bool:
    """Whether the system tells the peak of a process and can start it anew."""
    return os.access(REFS, os.W_OK)


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Freed blocks go back to the system at once: else they would hide the next allocation."""
    set_option = ctypes.CDLL(None).mallopt
    set_option(MMAP_THRESHOLD, SMALL)
    set_option(TRIM_THRESHOLD, SMALL)
    try:
        yield
    finally:
        # What the allocator itself comes to when large blocks are freed often.
        set_option(MMAP_THRESHOLD, LARGE)
        set_option(TRIM_THRESHOLD, 2 * LARGE)


def extra(run: Callable[[], Any]) -> int:
    """Bytes beyond what the process held. In a new thread, since the core keeps scratch for its caller."""
    found: list[int] = []

    def work() -> None:
        gc.collect(1)  # what the last call left; all of it would take longer than most calls
        ctypes.CDLL(None).malloc_trim(0)
        REFS.write_text("5")  # the high-water mark starts again from here
        before = status("VmRSS")
        result = run()
        found.append(status("VmHWM") - before)
        del result

    in_thread(work)
    return max(found[0], 0)


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def status(name: str) -> int:
    """A line of the system's report on this process, in bytes."""
    line = next(s for s in STATUS.read_text(encoding="ascii").splitlines() if s.startswith(name + ":"))
    return 1024 * int(line.split()[1])
