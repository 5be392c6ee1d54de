"""Claim: softmax([2.3, 9.1, 0.5]) is about [0.002, 0.995, 0.003].
`regard claims softmax_example`

This result, which the notes print, cannot be right: softmax preserves the order of scores, and the
score 2.3 is larger than 0.5, but has the smaller weight.
"""

from __future__ import annotations

import math

from .finding import Finding, verdict

SCORES = [2.3, 9.1, 0.5]
PRINTED = [0.002, 0.995, 0.003]


def measure() -> Finding:
    exponentials = [math.exp(score) for score in SCORES]
    right = [x / sum(exponentials) for x in exponentials]
    ranks = [sorted(range(3), key=row.__getitem__) for row in (SCORES, right, PRINTED)]
    agree = all(abs(a - b) <= 0.0005 for a, b in zip(right, PRINTED, strict=True))
    text = ", ".join(f"{x:.4f}" for x in right)
    return Finding(
        claim="softmax([2.3, 9.1, 0.5]) is about [0.002, 0.995, 0.003]",
        verdict=verdict(agree),
        measured=f"[{text}]; the notes give the score 0.5 a larger weight than the score 2.3",
        correct=f"[{text}]",
        numbers={
            "softmax": right,
            "printed": PRINTED,
            "keeps the order": ranks[1] == ranks[0],
            "printed one keeps the order": ranks[2] == ranks[0],
        },
    )
