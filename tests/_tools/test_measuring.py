"""Tests of the measurements of time and peak memory."""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep

import pytest
import torch

from regard._tools import measuring
from regard.cost import best_times, peak_memory

needs_peaks = pytest.mark.skipif(
    not os.access(measuring.REFS, os.W_OK), reason="the system does not report the peak of a process"
)


def test_best_times_alternates_calls_and_keeps_the_minimum() -> None:
    order: list[str] = []
    delays = iter((0.05, 0.0, 0.0))

    def first() -> None:
        order.append("first")
        sleep(next(delays))

    times = best_times({"first": first, "second": lambda: order.append("second")}, 0.0)
    assert order == ["first", "second"] * 3
    assert 0 <= times["first"] < 0.05
    assert times["second"] >= 0


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
