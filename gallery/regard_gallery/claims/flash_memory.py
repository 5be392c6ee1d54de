"""Claim: flash attention needs memory linear in the length. `regard claims flash_memory`

Measures the peak memory of the process beyond q, k and v, as Linux reports it. Compares Regard's
tiled kernel with the textbook formula, which stores the n x n weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import regard
from regard.cost import peak_memory

from .finding import Finding, verdict
from .formula import attend

HEADS, D = 4, 64


def peaks(lengths: list[int]) -> tuple[list[int], list[int]]:
    """Returns the peak bytes of Regard and of the formula, beyond q, k and v, at each length."""
    found: tuple[list[int], list[int]] = [], []
    calls: tuple[Callable[..., Tensor], ...] = regard.attention, attend
    for n in [64, *lengths]:  # the first length is a warm-up, which loads code
        qkv = torch.randn(3, HEADS, n, D)
        for bytes_, call in zip(found, calls, strict=True):
            peak = peak_memory(partial(call, *qkv))
            if peak is None:
                raise OSError("the system does not report the peak memory of a process")
            bytes_.append(peak)
    return found[0][1:], found[1][1:]


def measure(longest: int = 8192) -> Finding:
    lengths = [longest // step for step in (4, 2, 1)]
    ours, plain = peaks(lengths)
    growth = ours[-1] / ours[-2], plain[-1] / plain[-2]
    return Finding(
        claim="flash attention takes memory linear in the length",
        verdict=verdict(growth[0] < 2.5),
        measured=f"at twice the length, Regard takes {growth[0]:.1f} times the memory, "
        f"and the formula with stored n x n weights takes {growth[1]:.1f} times the memory",
        correct=f"linear; for {HEADS} heads at n = {longest:,}, Regard takes {ours[-1] / 2**20:.0f} MiB, "
        f"and the formula with stored weights takes {plain[-1] / 2**20:,.0f} MiB",
        numbers={
            "tokens": lengths,
            "bytes": ours,
            "bytes of the formula": plain,
            "growth at the last doubling": growth,
        },
    )
