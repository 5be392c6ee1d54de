"""Claim: Linformer makes attention linear by the kernel trick. `regard claims linformer_kernel`

In a kernel form, the weight of key j for query i is phi(q_i).phi(k_j), divided by the sum over
keys. Then the ratio of the weights of two keys depends on the query and on these two keys only. It
does not change with another key, and not with the order of the keys. Linformer instead multiplies
keys and values by matrices E and F along the sequence, and then uses the softmax. The experiment
computes the effective weights of Linformer and of Performer, which has a kernel form, from their
outputs for the values 1 at one key and 0 at all others. It measures by how much the logarithm of
the ratio changes. Both kinds of weights have a low rank, so the rank does not tell them apart, but
its limit is the number of rows of E in Linformer, and the number of features in Performer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.nn import LinformerAttention, LinformerProjection, PerformerAttention

from .finding import Finding, verdict

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def effective(attend: Attend, q: Tensor, k: Tensor) -> Tensor:
    """Returns the weights (n, n) of an attention that is linear in the values, for q and k (n, D)."""
    values = torch.eye(len(k), dtype=k.dtype)
    return attend(q[None, None], k[None, None], values[None, None])[0, 0]


def ratios(weights: Tensor, a: int, b: int) -> Tensor:
    """Returns the logarithm of the ratio of the weights of keys a and b, for each query."""
    return (weights[:, a] / weights[:, b]).abs().log()


def changes(attend: Attend, q: Tensor, k: Tensor) -> tuple[float, float]:
    """Returns the largest change of the ratio of keys 0 and 1, by another key and by another order."""
    before = ratios(effective(attend, q, k), 0, 1)
    other = k.clone()
    other[-1] += 1
    by_key = ratios(effective(attend, q, other), 0, 1) - before
    by_order = ratios(effective(attend, q, k.flip(0)), -1, -2) - before
    return float(by_key.abs().max()), float(by_order.abs().max())


def accepts(attend: Attend, n: int, d: int) -> bool:
    """Returns whether an attention takes n tokens."""
    try:
        attend(*torch.randn(3, 1, 1, n, d, dtype=torch.float64))
    except ValueError:
        return False
    return True


def judge(by_key: float, by_order: float) -> str:
    """Returns the verdict from the changes of a ratio of weights, which are 0 for a kernel."""
    fixed = by_key < 1e-6, by_order < 1e-6
    return verdict(all(fixed), "incomplete" if any(fixed) else "wrong")


def attentions(n: int, d: int, rank: int, features: int) -> dict[str, Attend]:
    torch.manual_seed(0)
    options = {"dtype": torch.float64}
    projection = LinformerProjection(n, rank, **options)  # type: ignore[arg-type]
    linformer = LinformerAttention(d, 1, projection, **options)  # type: ignore[arg-type]
    performer = PerformerAttention(d, 1, features=features, eps=0.0, seed=0, **options)  # type: ignore[arg-type]
    return {"Linformer": linformer.eval().attend, "Performer": performer.eval().attend}


@torch.no_grad()
def measure(n: int = 64, d: int = 8, rank: int = 16, features: int = 24) -> Finding:
    layers = attentions(n, d, rank, features)
    q, k = torch.randn(2, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    changed = {name: changes(attend, q, k) for name, attend in layers.items()}
    found = {name: effective(attend, q, k) for name, attend in layers.items()}
    ranks = {name: int(torch.linalg.matrix_rank(weights)) for name, weights in found.items()}
    longer = {name: accepts(attend, n + 1, d) for name, attend in layers.items()}
    (key, order), (kernel_key, kernel_order) = changed["Linformer"], changed["Performer"]
    negative = float((found["Linformer"] < 0).double().mean())
    return Finding(
        claim="Linformer makes attention linear by the kernel trick",
        verdict=judge(key, order),
        measured="the ratio of two keys' weights changes by a factor of up to "
        f"{math.exp(key):,.0f} if another key changes, and {math.exp(order):,.0f} if the order of the keys "
        f"is reversed; {negative:.0%} of the weights are negative",
        correct="Linformer projects keys and values along the sequence, for which it needs a largest length "
        f"({n + 1} tokens {'pass' if longer['Linformer'] else 'raise'} after {n}); Performer has kernel "
        f"form: its ratios change by {max(kernel_key, kernel_order):.0e}; ranks of the weights: "
        f"{ranks['Linformer']} (rows of E: {rank}) and {ranks['Performer']} (features: {features})",
        numbers={
            "change of a ratio by another key": {name: c[0] for name, c in changed.items()},
            "change of a ratio by another order": {name: c[1] for name, c in changed.items()},
            "ranks of the weights": ranks,
            "one token more is accepted": longer,
            "share of Linformer's weights below 0": negative,
        },
    )
