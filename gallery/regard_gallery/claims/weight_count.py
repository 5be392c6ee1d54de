"""Claim: 1024, 4096 and 100,000 tokens have 1M, 16M and 10G weights, and 100,000 are not feasible.
`regard claims weight_count`

The counts are for one head. The conclusion does not follow from them: attention does not have to
store the weights. The experiment runs attention over 100,000 tokens, measures its extra memory, and
compares some rows with the formula in float64. It takes about twenty seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

import regard
from regard.cost import peak_memory

from .finding import Finding, verdict
from .formula import attend

PRINTED = {1024: 1e6, 4096: 16e6, 100_000: 10e9}
D = 16


def scores(n: int) -> int:
    """Returns the number of query-key scores of n tokens, without computing the scores."""
    q = torch.empty(n, D, device="meta")
    return (q @ q.T).numel()


def attended(n: int) -> tuple[float, int | None]:
    """Runs attention over n tokens.

    Returns the largest error of 16 rows, and the peak bytes beyond q, k and v, or None if the
    system does not report them.
    """
    q, k, v = torch.randn(3, 1, n, D, generator=torch.Generator().manual_seed(0))
    out: list[Tensor] = []
    regard.attention(q[:, :64], k[:, :64], v[:, :64])  # loads code
    peak = peak_memory(lambda: out.append(regard.attention(q, k, v)))
    rows = torch.linspace(0, n - 1, 16).long()
    exact = attend(q[:, rows].double(), k.double(), v.double())
    return float((out[0][:, rows] - exact).abs().max()), peak


def measure(tokens: int = 100_000) -> Finding:
    counts = {n: scores(n) for n in PRINTED}
    far = max(abs(counts[n] / printed - 1) for n, printed in PRINTED.items())
    error, peak = attended(tokens)
    memory = "an unknown amount" if peak is None else f"{peak / 1e6:.0f} MB"
    return Finding(
        claim="1024 / 4096 / 100k tokens have 1M / 16M / 10G weights, and 100k are not feasible",
        verdict=verdict(far < 0.05 and not error < 1e-5, "incomplete" if far < 0.05 else "wrong"),
        measured=f"{' / '.join(f'{count:,}' for count in counts.values())} weights; a run of {tokens:,} "
        f"tokens (one head, d = {D}) takes {memory} of extra memory and is right within {error:.0e}",
        correct=f"n^2 weights, which would take {4 * counts[100_000] / 1e9:.0f} GB in float32 for n = 100k; "
        "attention is computed without storing them",
        numbers={
            "weights": {f"{n:,}": count for n, count in counts.items()},
            "bytes in float32": {f"{n:,}": 4 * count for n, count in counts.items()},
            "tokens that were run": tokens,
            "largest error of 16 rows": error,
            "extra bytes of the run": peak,
        },
    )
