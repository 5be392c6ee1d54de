"""Claim: the notes' attention module applies `attn_mask`, and applies dropout only in training.
`regard claims unused_mask`

The module never uses `attn_mask`, and it applies dropout in evaluation too. Neither fault raises an
error. Two checks find the faults: with a causal mask, the last token must not change earlier
outputs; and in evaluation, two equal calls must give equal results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks as M
from regard.nn import Attention

from .finding import Finding, verdict
from .formula import weights


class Printed(nn.Module):
    """The notes' module with its two faults. It shares the projections of a correct layer."""

    def __init__(self, right: Attention, dropout: float) -> None:
        super().__init__()
        self.right, self.dropout = right, dropout

    def forward(self, x: Tensor, attn_mask: M.Mask | None = None) -> Tensor:
        (q, k, v), _ = self.right.arguments(x)
        kept = F.dropout(weights(q, k), self.dropout)  # F.dropout defaults to training=True
        found: Tensor = self.right.out((kept @ v).transpose(1, 2).flatten(2))
        return found


def leak(layer: nn.Module, x: Tensor, **mask: M.Mask) -> float:
    """Returns the largest change of earlier outputs if the last token changes."""
    other = x.clone()
    other[:, -1] += 1
    torch.manual_seed(1)
    first = layer(x, **mask)
    torch.manual_seed(1)
    return float((layer(other, **mask) - first)[:, :-1].abs().max())


def unrest(layer: nn.Module, x: Tensor, **mask: M.Mask) -> float:
    """Returns the largest difference between the results of two equal calls."""
    return float((layer(x, **mask) - layer(x, **mask)).abs().max())


@torch.no_grad()
def measure(n: int = 11, d: int = 32, dropout: float = 0.1) -> Finding:
    torch.manual_seed(0)
    right = Attention(d, 4, dropout=dropout).eval()
    printed = Printed(right, dropout).eval()
    x = torch.randn(2, n, d)
    ours = leak(right, x, mask=M.Causal()), unrest(right, x, mask=M.Causal())
    theirs = leak(printed, x, attn_mask=M.Causal()), unrest(printed, x, attn_mask=M.Causal())
    return Finding(
        claim="the notes' module applies `attn_mask`, and dropout only in training",
        verdict=verdict(theirs == (0, 0)),
        measured=f"a change of the last token changes earlier outputs by {theirs[0]:.2g}; "
        f"the results of two equal calls in evaluation differ by {theirs[1]:.2g}",
        correct=f"with `regard.nn.Attention`, these two differences are {ours[0]:g} and {ours[1]:g}",
        numbers={
            "future on past, printed": theirs[0],
            "future on past, regard.nn": ours[0],
            "call to call in evaluation, printed": theirs[1],
            "call to call in evaluation, regard.nn": ours[1],
        },
    )
