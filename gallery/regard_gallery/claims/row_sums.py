"""Claim: the rows of the weights sum to 1. `regard claims row_sums`

The claim holds, with three exceptions in practice: a fully masked row sums to 0, a sink takes a
share of the weight, so that the keys' weights sum to less than 1, and dropout preserves the sum
only on average.
"""

from __future__ import annotations

from typing import Any

import torch

import regard
from regard import masks as M

from .finding import Finding, verdict


def measure(n: int = 256, d: int = 64) -> Finding:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, n, d, generator=generator)

    def sums(**options: Any) -> torch.Tensor:
        return regard.weights(q, k, v, **options).double().sum(-1)

    away = float((sums() - 1).abs().max())
    nothing = float(sums(mask=M.Lengths(0)).max())
    sink = float(sums(sink=torch.full((4,), 3.0)).mean())
    dropped = sums(dropout=0.5, seed=1)
    return Finding(
        claim="each row of the weights sums to 1",
        verdict=verdict(away < 1e-5),
        measured=f"the sums differ from 1 by at most {away:.0e}",
        correct=f"1, except for a fully masked row ({nothing:g}), with a sink (below 1) "
        "and with dropout (1 only on average)",
        numbers={
            "farthest from 1": away,
            "a row that sees nothing": nothing,
            "with a sink of 3, mean": sink,
            "with dropout 0.5, mean": float(dropped.mean()),
            "with dropout 0.5, from and to": [float(dropped.min()), float(dropped.max())],
        },
    )
