"""Claim: multi-head attention costs as many FLOPs as single-head attention.
`regard claims head_flops`

Heads divide the width: h products over d / h channels cost as much as one product over d channels.
FLOPs are counted while PyTorch executes the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .finding import Finding, verdict
from .formula import weights

HEADS = 1, 2, 4, 8, 16


def layer(x: Tensor, qkv: Tensor, out: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Applies a multi-head attention layer to x (n, d).

    Returns the output (n, d) and the attention weights (heads, n, n).
    """
    q, k, v = (x @ qkv).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)  # (heads, n, d / heads) each
    found = weights(q, k)
    return (found @ v).movedim(0, 1).flatten(1) @ out, found


def count(n: int, d: int, heads: int) -> tuple[int, int]:
    """Returns the numbers of FLOPs in matrix products and of exponentials in the softmax."""
    x, qkv, out = (torch.empty(*shape, device="meta") for shape in ((n, d), (d, 3 * d), (d, d)))
    with FlopCounterMode(display=False) as counter:
        _, found = layer(x, qkv, out, heads)
    return counter.get_total_flops(), found.numel()


def measure(n: int = 1024, d: int = 512) -> Finding:
    flops, exponentials = zip(*(count(n, d, heads) for heads in HEADS), strict=True)
    return Finding(
        claim="multi-head costs the same FLOPs as single-head",
        verdict=verdict(len(set(flops)) == 1),
        measured=f"{flops[0] / 1e9:.3f} GFLOP for each number of heads ({', '.join(map(str, HEADS))})",
        correct="8 n d^2 + 4 n^2 d FLOPs for any number of heads h; but the softmax takes h n^2 "
        f"exponentials: {exponentials[-1] // exponentials[0]} times as many with {HEADS[-1]} heads "
        "as with one head",
        numbers={
            "FLOPs by heads": dict(zip(map(str, HEADS), flops, strict=True)),
            "exponentials by heads": dict(zip(map(str, HEADS), exponentials, strict=True)),
        },
    )
