"""Tests of the measurements of time and peak memory."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from regard._tools import measuring
from regard.cost import best_times, peak_memory

needs_peaks = pytest.mark.skipif(
    not os.access(measuring.REFS, os.W_OK), reason="the system does not report the peak of a process"
)


def test_best_times_alternates_calls_and_keeps_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order, delays = 0.0, [], iter((5.0, 1.0, 3.0, 7.0, 2.0, 4.0))
    monkeypatch.setattr(measuring, "perf_counter", lambda: now)

    def run(name: str) -> None:
        nonlocal now
        order.append(name)
        now += next(delays)

    times = best_times({name: partial(run, name) for name in ("first", "second")}, 0.0)
    assert order == ["first", "second"] * 3
    assert times == {"first": 2, "second": 1}


@needs_peaks
def test_peak_memory_counts_allocations() -> None:
    size = 64 * 2**20
    peak = peak_memory(lambda: torch.ones(size, dtype=torch.uint8))
    assert peak is not None
    assert size <= peak < 1.5 * size


@needs_peaks
def test_peak_memory_raises_errors_of_the_call() -> None:
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 // 0)


def test_peak_memory_is_none_without_system_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "REFS", Path("no such file"))
    assert peak_memory(lambda: 1 // 0) is None
