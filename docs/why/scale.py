"""Why divide by sqrt(d_k)? `python docs/why/scale.py`

64 random keys for each of 512 random queries. The scores have a standard deviation of sqrt(d_k): with
many channels one score is far above the others, its weight is nearly 1, and the softmax is flat there:
next to nothing flows back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import regard

CHANNELS = 4, 16, 64, 256, 1024


class Row(NamedTuple):
    largest: float  # weight of a query, the median; 1 / 64 if all were the same
    slope: float  # norm of the softmax's derivative by the scores, the median


def slopes(weights: Tensor) -> Tensor:
    """Norms of the matrices diag(w) - w w^T, one for each row of weights."""
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
