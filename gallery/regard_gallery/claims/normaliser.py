"""Claim: Attention(Q, K, V) is approximately phi(Q) (phi(K)^T V). `regard claims normaliser`

The weights phi(q).phi(k) estimate exp(q.k / sqrt(d)), which is the numerator of the softmax. The
formula of the notes lacks the denominator, the sum of these weights over keys. The experiment uses
Performer's positive random features and measures the error of both formulas relative to attention,
at two lengths.
"""

from __future__ import annotations

import math

import torch

from regard.features import orthogonal_gaussian, positive_features

from .finding import Finding, verdict
from .formula import attend, relative


def errors(n: int, d: int, features: int) -> tuple[float, float]:
    """Returns the relative errors without and with the denominator, for n random tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, n, d, generator=generator, dtype=torch.float64)
    q, k = q / 2, k / 2  # small scores, which the features estimate well
    projection = orthogonal_gaussian(features, d, generator=generator, dtype=torch.float64)
    scale = 1 / math.sqrt(d)
    a, b = (positive_features(x, projection, scale=scale) for x in (q, k))
    exact, printed = attend(q, k, v), a @ (b.T @ v)
    normalised = printed / (a @ b.sum(0))[:, None]
    return relative(printed, exact), relative(normalised, exact)


def measure(n: int = 256, d: int = 16, features: int = 1024) -> Finding:
    short, long = errors(n // 2, d, features), errors(n, d, features)
    return Finding(
        claim="Attention(Q, K, V) is approximately phi(Q) (phi(K)^T V)",
        verdict=verdict(long[0] < 0.5, "incomplete" if long[1] < 0.5 else "wrong"),
        measured=f"relative error {short[0]:.0f} for {n // 2} tokens and {long[0]:.0f} for {n} tokens "
        f"({features} features, d = {d})",
        correct="divide by phi(Q) (phi(K)^T 1), the sum of the weights: "
        f"relative error {short[1]:.2f} and {long[1]:.2f}",
        numbers={
            "tokens": [n // 2, n],
            "relative error, printed": [short[0], long[0]],
            "relative error, normalised": [short[1], long[1]],
        },
    )
