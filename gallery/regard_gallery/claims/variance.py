"""Claim: q . k has variance d_k, and 1 after division by sqrt(d_k).
`regard claims variance`

If the entries of q and k are independent with mean 0 and variance 1, each of the d_k products in q
. k has variance 1, and the variances of independent terms add up. For d_k = 64, the notes report
the measured variances 63.87 before the division and 0.998 after it.
"""

from __future__ import annotations

import math

import torch

from .finding import Finding, verdict

PRINTED = 63.87, 0.998


def measure(samples: int = 100_000, d_k: int = 64) -> Finding:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, samples, d_k, generator=generator)
    dots = (q * k).sum(-1).double()
    plain, scaled = float(dots.var()), float((dots / math.sqrt(d_k)).var())
    # The kurtosis of q . k is 3 + 6 / d_k, which gives the relative standard error of the variance.
    spread = math.sqrt((2 + 6 / d_k) / samples)
    far = max(abs(plain / d_k - 1), abs(scaled - 1), abs(PRINTED[0] / 64 - 1))
    return Finding(
        claim="Var[q.k] = d_k, and 1 after scaling",
        verdict=verdict(far < 4 * spread),
        measured=f"variance {plain:.2f}, after scaling {scaled:.3f} (in the notes: 63.87 and 0.998)",
        correct=f"variance {d_k}, after scaling 1; with {samples:,} samples, "
        f"the measured variance has a standard error of {d_k * spread:.2f}",
        numbers={"Var[q.k]": plain, "after scaling": scaled, "expected scatter": d_k * spread},
    )
