"""Claim: scores are replaced by -1e9 where the mask is not 0. `regard claims mask_comment`

This is a comment in the notes. The line below it fills the scores where the mask *is* 0, which is
right for a mask whose ones mark allowed keys. The experiment runs the line with a causal mask of
ones and zeros and adds up the weights at ones and at zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

import regard
from regard import masks as M

from .finding import Finding, verdict


def masses(scores: Tensor, mask: Tensor, filled: Tensor) -> tuple[float, float]:
    """Fills scores (n, n) with -1e9 where `filled`, and returns the mean mass per query.

    The first mass is on keys where the mask is not 0, the second on keys where it is 0.
    """
    found = scores.masked_fill(filled, -1e9).softmax(-1)
    return float((found * (mask != 0)).sum(-1).mean()), float((found * (mask == 0)).sum(-1).mean())


def measure(n: int = 11, d: int = 16) -> Finding:
    q, k = torch.randn(2, 1, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores, mask = (q @ k.mT)[0] / d**0.5, torch.ones(n, n).tril()
    code, comment = masses(scores, mask, mask == 0), masses(scores, mask, mask != 0)
    ours = regard.weights(q, k, k, mask=M.Causal())[0]
    error = float((scores.masked_fill(mask == 0, -1e9).softmax(-1) - ours).abs().max())
    return Finding(
        claim="scores are replaced by -1e9 where the mask is not 0 (a comment)",
        verdict=verdict(code[0] == 0, "incomplete" if 0 < code[0] < 1 - 1e-9 else "wrong"),
        measured=f"the code below the comment leaves a weight of {code[0]:g} where the mask is not 0, "
        f"and {code[1]:g} where it is 0",
        correct=f"the code fills where the mask is 0, which gives causal attention within {error:.0e}; "
        f"code that followed the comment would put {comment[1]:.2f} of the weight on the future",
        numbers={
            "weight where the mask is not 0, code": code[0],
            "weight where the mask is 0, code": code[1],
            "weight where the mask is 0, by the comment": comment[1],
            "code beside regard.weights": error,
        },
    )
