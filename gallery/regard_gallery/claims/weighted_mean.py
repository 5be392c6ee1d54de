"""Claim: attention can realise any weighted mean. `regard claims weighted_mean`

The scores Q K^T have at most rank d_k, so with n > d_k + 1 tokens the weights are not arbitrary:
the logarithms of the weights differ from a matrix of rank d_k by one number for each row. The
experiment gives attention the best case, in which queries and keys are free parameters. It fits
them to random weights (each row uniformly distributed on the simplex), and reports the remaining
Kullback-Leibler divergence in nats, averaged over rows. It takes about ten seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .finding import Finding, verdict
from .formula import weights

WIDTHS = 8, 16, 32, 64


def divergence(target: Tensor, found: Tensor) -> Tensor:
    """Returns the Kullback-Leibler divergence of weights (n, n) from the target, mean over rows."""
    return (target * (target.log() - found.log())).sum(-1).mean()


def fitted(target: Tensor, d_k: int, steps: int) -> float:
    """Fits free queries and keys of width d_k to target weights (n, n), and returns the divergence."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(len(target), d_k, generator=generator).requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([q, k], 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        divergence(target, weights(q, k)).backward()
        optimizer.step()
        schedule.step()
    return float(divergence(target, weights(q, k)).detach())


def measure(n: int = 64, steps: int = 800) -> Finding:
    torch.manual_seed(0)
    target = torch.distributions.Dirichlet(torch.ones(n)).sample((n,)).clamp_min(1e-12)
    uniform = float(divergence(target, torch.full((n, n), 1 / n)))
    left = {d_k: fitted(target, d_k, steps) for d_k in WIDTHS}
    reached = [d_k for d_k, nats in left.items() if nats < 0.01]
    return Finding(
        claim="attention can realise any weighted mean",
        verdict=verdict(reached == list(WIDTHS), "incomplete" if reached else "wrong"),
        measured=f"the best weights for {n} tokens are {' / '.join(f'{x:.2g}' for x in left.values())} nats "
        f"from random weights at d_k = {' / '.join(map(str, WIDTHS))} (equal weights: {uniform:.2f})",
        correct="any weights for one query; for n queries only if d_k is about n, because the scores have "
        "rank d_k at most",
        numbers={
            "nats from random weights, by d_k": {str(d_k): nats for d_k, nats in left.items()},
            "nats of equal weights": uniform,
            "widths that realise the target within 0.01 nats": reached,
        },
    )
