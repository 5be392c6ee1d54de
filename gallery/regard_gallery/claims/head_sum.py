"""Claim: the output of multi-head attention is a non-linear combination of the heads.
`regard claims head_sum`

The notes write the output as f(sum of head_i W_i^O) with an f that they do not define. The output
projection of the concatenated heads is the sum of head_i W_i^O itself, which is linear in the
heads. What is not linear is the way from tokens to heads, which has a softmax.
"""

from __future__ import annotations

import torch

from regard.nn import Attention

from .finding import Finding, verdict
from .formula import attend, relative


@torch.no_grad()
def measure(n: int = 11, d: int = 64, heads: int = 4) -> Finding:
    torch.manual_seed(0)
    layer = Attention(d, heads, bias=False).double().eval()
    x = torch.randn(1, n, d, dtype=torch.float64)
    (q, k, v), _ = layer.arguments(x)
    found = attend(q, k, v)[0]  # (H, L, D)
    parts = layer.out.weight.T.unflatten(0, (heads, -1))  # W_i^O: (H, D, d)
    output = layer(x)[0]
    apart = relative((found @ parts).sum(0), output)  # f is the identity if this is 0
    bent = relative(layer(2 * x)[0], 2 * output)
    return Finding(
        claim="the output is a non-linear combination f(sum of head_i W_i^O) of the heads",
        verdict=verdict(apart > 1e-6),
        measured=f"the output differs from the plain sum of head_i W_i^O by {apart:.0e}",
        correct="a plain sum, linear in the heads; the layer is not linear in the tokens: with tokens twice "
        f"as large, the output is {bent:.2f} (relative) away from twice the output",
        numbers={
            "relative difference from the sum of head_i W_i^O": apart,
            "relative distance from linear in the tokens": bent,
        },
    )
