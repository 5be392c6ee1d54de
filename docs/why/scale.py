"""Why divide by sqrt(d_k)? `python docs/why/scale.py`

Each of 512 random queries attends to 64 random keys. Without the division, the scores have a
standard deviation of sqrt(d_k). With many channels, one score is far above the others, and its
weight is nearly 1. The weights then hardly change if the scores change, so almost no gradient flows
back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import regard

CHANNELS = 4, 16, 64, 256, 1024


class Row(NamedTuple):
    largest: float  # largest weight of a query, median over queries; 1 / 64 if uniform
    slope: float  # norm of the softmax's Jacobian, median over queries


def slopes(weights: Tensor) -> Tensor:
    """Returns the norm of the softmax's Jacobian, diag(w) - w w^T, for each row w of weights."""
    return (weights.diag_embed() - weights[..., :, None] * weights[..., None, :]).norm(dim=(-2, -1))


def row(d_k: int, scale: float | None) -> Row:
    generator = torch.Generator().manual_seed(d_k)
    q, k = torch.randn(512, d_k, generator=generator), torch.randn(64, d_k, generator=generator)
    weights = regard.weights(q, k, k, scale=scale)
    return Row(float(weights.amax(-1).median()), float(slopes(weights).median()))


def measure() -> dict[int, dict[str, Row]]:
    return {d_k: {"plain": row(d_k, 1.0), "scaled": row(d_k, None)} for d_k in CHANNELS}


if __name__ == "__main__":
    for d_k, found in measure().items():
        for name, (largest, slope) in found.items():
            print(f"d_k {d_k:>4}, {name:<6}: largest weight {largest:.3f}, slope {slope:.2g}")
