"""Claim: for attention over (L, B, H, D), it suffices to transpose axes 0 and 1.
`regard claims sequence_first`

The result has the shape (B, L, H, D). Its last two axes are heads and channels, so `q @ k^T`
compares the heads of one token with each other. No token influences any other token. Without masks
the shapes fit, and nothing raises. The notes' masks of padding (B, L) and of the future (L, L) do
not fit to weights (B, L, H, H) and raise, unless there are as many tokens as heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import regard

from .finding import Finding, verdict
from .formula import attend, relative, weights


def as_printed(x: Tensor) -> Tensor:
    return x.transpose(0, 1)  # (L, B, H, D) -> (B, L, H, D)


def as_meant(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)  # (L, B, H, D) -> (B, H, L, D)


def influence(arrange: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Returns how much the first token's output changes if all other tokens change.

    x (L, B, H, D) is used as queries, keys and values.
    """
    other = x.clone()
    other[1:] += 1
    before, after = (attend(*[arrange(each)] * 3) for each in (x, other))
    token = arrange(torch.arange(len(x))[:, None, None, None].expand(x.shape))
    return float((after - before)[token == 0].abs().max())


def accepts_masks(L: int, B: int, heads: int) -> bool:
    """Returns whether the two masks of the notes can be applied to scores of the printed code."""
    scores = torch.zeros(B, L, heads, heads)
    padding, future = torch.zeros(B, L, dtype=torch.bool), torch.ones(L, L).tril()
    try:
        scores.masked_fill(padding[:, None, None], -torch.inf).masked_fill(future == 0, -torch.inf)
    except RuntimeError:
        return False
    return True


def measure(L: int = 7, B: int = 3, heads: int = 4, D: int = 5) -> Finding:
    x = torch.randn(L, B, heads, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    heard = influence(as_printed, x), influence(as_meant, x)
    printed, meant = as_printed(x), as_meant(x)
    right = regard.attention(meant, meant, meant)  # (B, H, L, D)
    errors = [
        relative(found, right)
        for found in (attend(printed, printed, printed).transpose(1, 2), attend(meant, meant, meant))
    ]
    accepted = [n for n in range(2, 3 * heads) if accepts_masks(n, B, heads)]
    return Finding(
        claim="attention over (L, B, H, D) needs only a transposition of axes 0 and 1",
        verdict=verdict(errors[0] < 1e-6),
        measured=f"if all other tokens change, a token's result changes by {heard[0]:g}; "
        f"the relative error of the result is {errors[0]:.2f}; with the notes' masks and {heads} heads, "
        f"all lengths from 2 to {3 * heads - 1} raise except {', '.join(map(str, accepted))}",
        correct="permute to (B, H, L, D): if all other tokens change, "
        f"a token's result changes by {heard[1]:.2f}; the relative error is {errors[1]:.0e}",
        numbers={
            "weights of the printed one": list(weights(printed, printed).shape),
            "weights that are meant": list(weights(meant, meant).shape),
            "influence of other tokens, printed": heard[0],
            "influence of other tokens, meant": heard[1],
            "relative error, printed": errors[0],
            "relative error, meant": errors[1],
            f"numbers of tokens with which masks do not raise, {heads} heads": accepted,
        },
    )
