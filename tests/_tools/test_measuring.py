"""Time and peak memory of calls."""

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


def test_calls_take_turns_and_the_shortest_time_counts() -> None:
    order: list[str] = []
    slow = iter((0.05, 0.0, 0.0))

    def first() -> None:
        order.append("first")
        sleep(next(slow))

    found = best_times({"first": first, "second": lambda: order.append("second")}, 0.0)
    assert order == ["first", "second"] * 3
    assert 0 <= found["first"] < 0.05
    assert found["second"] >= 0


@needs_peaks
def test_memory_counts_what_is_allocated() -> None:
    size = 64 * 2**20
    found = peak_memory(lambda: torch.ones(size, dtype=torch.uint8))
    assert found is not None
    assert size <= found < 1.5 * size


@needs_peaks
def test_an_error_of_the_call_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 // 0)


def test_where_the_system_does_not_tell_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "REFS", Path("no such file"))
    assert peak_memory(lambda: 1 // 0) is None
