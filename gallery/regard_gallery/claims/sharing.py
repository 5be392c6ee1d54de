"""Claim: self-attention shares no parameters between positions, but heads share weights.
`regard claims sharing`

The experiment changes the query projection of one head, and looks at which heads and which
positions the outputs change. A change at all positions means that positions share the projection.
A change in one head only means that heads do not share it. It also permutes the tokens: if all
positions have the same parameters, the outputs are permuted in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.nn import Attention

from .finding import Finding, verdict
from .formula import attend


def heads_of(layer: Attention, x: Tensor) -> Tensor:
    """Returns the outputs of all heads (H, L, D) before the output projection, for x (1, L, d)."""
    (q, k, v), _ = layer.arguments(x)
    return attend(q, k, v)[0]


@torch.no_grad()
def measure(n: int = 13, d: int = 64, heads: int = 4) -> Finding:
    torch.manual_seed(0)
    layer = Attention(d, heads).double()
    x = torch.randn(1, n, d, dtype=torch.float64)
    order = torch.randperm(n)
    equivariance = float((layer(x[:, order]) - layer(x)[:, order]).abs().max())
    before = heads_of(layer, x)
    D = d // heads
    query = layer.qkv.weight[:d].unflatten(0, (heads, D))  # a view: W_i^Q of each head
    distance = float((query[0] - query[1]).abs().max())
    query[0] += torch.randn(D, d, dtype=torch.float64)
    moved = (heads_of(layer, x) - before).abs().amax(-1) > 1e-9  # (H, L)
    positions, changed = int(moved[0].sum()), int(moved.any(-1).sum())
    holds = positions < n, changed > 1
    return Finding(
        claim="positions share no parameters, but heads share weights",
        verdict=verdict(all(holds), "incomplete" if any(holds) else "wrong"),
        measured=f"a change of one head's query matrix changes {positions} of {n} positions "
        f"and {changed} of {heads} heads",
        correct=f"reversed: all positions share the matrices (permuted tokens give permuted outputs, within "
        f"{equivariance:.0e}), and each head has its own (two query matrices differ by {distance:.2f})",
        numbers={
            "positions that change": positions,
            "heads that change": changed,
            "error of permuted outputs": equivariance,
            "largest difference of two heads' query matrices": distance,
        },
    )
