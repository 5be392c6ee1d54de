"""Claim: attention takes O(n^2 d) time. `regard claims quadratic_time`

The operations of the two matrix products are counted while PyTorch executes the textbook formula.
The times are those of `regard.attention`. An exponent of 2 means that twice the length takes four
times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.cost import best_times

from .finding import Finding, verdict
from .formula import attend


def operations(n: int, d: int) -> int:
    with FlopCounterMode(display=False) as counter:
        attend(*torch.empty(3, n, d, device="meta"))
    return int(counter.get_total_flops())


def exponent(values: Sequence[float]) -> float:
    """Returns the exponent e if the values grow as x^e and x doubles from one value to the next."""
    return math.log2(values[-1] / values[0]) / (len(values) - 1)


def times(shapes: Sequence[tuple[int, int]], seconds: float) -> list[float]:
    """Returns the shortest time of `regard.attention` in seconds, for each shape (n, d)."""
    calls = {f"{n} x {d}": partial(regard.attention, *torch.randn(3, 1, n, d)) for n, d in shapes}
    return list(best_times(calls, seconds).values())


def measure(longest: int = 8192, seconds: float = 4.0) -> Finding:
    lengths = [(longest // step, 64) for step in (8, 4, 2, 1)]
    widths = [(longest // 4, d) for d in (32, 64, 128, 256)]
    counted = exponent([operations(*x) for x in lengths]), exponent([operations(*x) for x in widths])
    by_n, by_d = times(lengths, seconds), times(widths, seconds)
    return Finding(
        claim="attention takes O(n^2 d) time",
        verdict=verdict(counted == (2, 1)),
        measured=f"the number of operations grows as n^{counted[0]:.2f} d^{counted[1]:.2f}, "
        f"the time as n^{exponent(by_n):.2f} d^{exponent(by_d):.2f}",
        correct="4 n^2 d operations, and n^2 exponentials that do not depend on d",
        numbers={
            f"operations, n = {longest}, d = 64": operations(longest, 64),
            "exponents of operations": counted,
            f"milliseconds, n = {[n for n, _ in lengths]}": [1e3 * t for t in by_n],
            f"milliseconds, d = {[d for _, d in widths]}": [1e3 * t for t in by_d],
            "exponents of time": (exponent(by_n), exponent(by_d)),
        },
    )
