"""Claim: attention takes n^2 d operations and n h (d / h) elements of memory.
`regard claims complexity_function`

The notes have a function that returns these two numbers for a length n, a width d and h heads. The
experiment counts FLOPs while PyTorch executes the formula, and elements of the stored weights and
of the cache. The growth with n and d is right for the FLOPs and for the cache. The counts are not:
there are two products of n^2 d multiplications and additions, the cache has keys and values, and
the formula stores h n^2 weights, of which the function says nothing.
"""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.nn import Attention

from .finding import Finding, verdict
from .formula import weights


def printed(n: int, d: int, heads: int) -> tuple[int, int]:
    """Returns the two numbers of the notes: operations and elements."""
    return n * n * d, n * heads * (d // heads)


def counted(n: int, d: int, heads: int) -> tuple[int, int, int]:
    """Returns the FLOPs of attention, the elements of a cache, and the elements of the weights."""
    q, k, v = torch.empty(3, heads, n, d // heads, device="meta")
    with FlopCounterMode(display=False) as counter:
        found = weights(q, k)
        found @ v
    cache = Attention(d, heads, device="meta").new_cache(1, n)
    return int(counter.get_total_flops()), cache.nbytes // 4, found.numel()


def measure(n: int = 4096, d: int = 512, heads: int = 8) -> Finding:
    said, (flops, cached, stored) = printed(n, d, heads), counted(n, d, heads)
    doubled = counted(2 * n, d, heads)
    powers = [
        math.log2(after / before) for after, before in zip(doubled, (flops, cached, stored), strict=True)
    ]
    factors = flops / said[0], cached / said[1]
    grows = powers[:2] == [2, 1]
    return Finding(
        claim="attention takes n^2 d operations and n h (d / h) elements",
        verdict=verdict(grows and factors == (1, 1), "incomplete" if grows else "wrong"),
        measured=f"for n = {n:,}, d = {d} and {heads} heads, {flops:.3g} FLOPs are {factors[0]:g} times the "
        f"notes' number, and {cached:.3g} cached elements are {factors[1]:g} times the notes' number",
        correct=f"4 n^2 d FLOPs; 2 n d cached elements (keys and values); the formula also stores h n^2 "
        f"weights, here {stored:.3g} elements, and a tiled kernel does not",
        numbers={
            "operations, elements by the notes": said,
            "FLOPs": flops,
            "elements of a cache": cached,
            "elements of the weights": stored,
            "exponents of n: FLOPs, cache, weights": powers,
        },
    )
