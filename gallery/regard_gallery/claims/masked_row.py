"""Claim: filling masked scores with -1e9 masks them. `regard claims masked_row`

In a row with at least one allowed key, -1e9 works as well as -inf. In a fully masked row all scores
are equal, and the softmax of equal scores is uniform: the output is the mean of the masked values.
With -inf, the output is 0 / 0 = NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import regard

from .finding import Finding, verdict


def filled(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, value: float) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, value).softmax(-1) @ v


def largest(out: Tensor) -> float:
    """Returns the largest absolute entry of the first row, which is fully masked."""
    return float(out[0].abs().max())


def refuses_half() -> bool:
    """Returns whether PyTorch raises if a float16 tensor is filled with -1e9 (out of range)."""
    try:
        torch.zeros(1, dtype=torch.float16).masked_fill(torch.tensor([True]), -1e9)
    except RuntimeError:
        return True
    return False


def judge(others: float, masked: float) -> str:
    """Returns the verdict from the error of rows with a key and the entries of a masked row."""
    return verdict(others < 1e-5 and masked == 0, "incomplete" if others < 1e-5 else "wrong")


def measure(n: int = 8, d: int = 16) -> Finding:
    q, k, v = torch.randn(3, 1, n, d, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(n, n, dtype=torch.bool).tril(-1)  # row 0 is fully masked
    notes, infinite = (filled(q, k, v, seen, value)[0] for value in (-1e9, -math.inf))
    ours = regard.attention(q, k, v, mask=seen)[0]
    mean = float((notes[0] - v[0].mean(0)).abs().max())
    others = float((notes[1:] - ours[1:]).abs().max())
    return Finding(
        claim="filling masked scores with -1e9 masks them",
        verdict=judge(others, largest(notes)),
        measured=f"rows with an allowed key are right within {others:.0e}; "
        f"a fully masked row returns the mean of the masked values, within {mean:.0e}",
        correct=f"true for rows with an allowed key; a fully masked row is {largest(ours):g} in Regard "
        f"(filling with -inf gives {float(infinite[0, 0])})",
        numbers={
            "largest entry of the row, -1e9": largest(notes),
            "its distance from the mean of V": mean,
            "entry of the row, -inf": float(infinite[0, 0]),
            "largest entry of the row, Regard": largest(ours),
            "other rows, -1e9 beside Regard": others,
            "float16 refuses -1e9": refuses_half(),
        },
    )
