"""Claim: 1024, 4096 and 100,000 tokens have 1M, 16M and 10G weights.
`regard claims weight_count`

The counts are for one head. The notes conclude that attention over 100,000 tokens is impossible.
This does not follow: attention does not have to store the weights.
"""

from __future__ import annotations

import torch

import regard

from .finding import Finding, verdict

PRINTED = {1024: 1e6, 4096: 16e6, 100_000: 10e9}


def scores(n: int) -> int:
    """Returns the number of query-key scores of n tokens, without computing the scores."""
    q = torch.empty(n, 64, device="meta")
    return (q @ q.T).numel()


def measure() -> Finding:
    counts = {n: scores(n) for n in PRINTED}
    far = max(abs(counts[n] / printed - 1) for n, printed in PRINTED.items())
    q = torch.empty(1, 100_000, 64)
    kept = regard.plan(q, q, q).peak_extra_bytes
    whole = 4 * counts[100_000]
    return Finding(
        claim="n = 1024 / 4096 / 100k gives 1M / 16M / 10G weights",
        verdict=verdict(far < 0.05),
        measured=" / ".join(f"{count:,}" for count in counts.values()),
        correct=f"n^2 weights, which take {whole / 1e9:.0f} GB in float32 for n = 100k; "
        f"Regard does not store them and needs {kept / 1e6:.0f} MB of extra memory",
        numbers={
            "weights": {f"{n:,}": count for n, count in counts.items()},
            "bytes in float32": {f"{n:,}": 4 * count for n, count in counts.items()},
            "extra bytes of regard.attention at 100,000": kept,
        },
    )
