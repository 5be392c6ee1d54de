"""Claim: the worked example's printed products follow from its printed matrices.
`regard claims worked_example`

The notes compute multi-head attention by hand for two tokens of width 4 and two heads of width 2.
Here, the products of tokens and query matrices are computed exactly, with fractions. The output of
the layer is then computed from the correct products. The notes do not print the matrices of keys
and values, so the queries are also used as keys and values.
"""

from __future__ import annotations

from fractions import Fraction

import torch

import regard

from .finding import Finding, verdict

X = [["1", "0.5", "-1", "2"], ["-0.5", "1", "0.3", "-2"]]
W_Q = (
    [["0.1", "0.4"], ["-0.2", "0.3"], ["1", "-0.5"], ["0.5", "0.2"]],
    [["-0.3", "0.2"], ["1.1", "0.6"], ["-0.4", "0.8"], ["0.7", "-0.1"]],
)
PRINTED = (
    [["0.85", "-0.05"], ["-0.29", "0.74"]],
    [["2.15", "0.65"], ["-1.32", "1.02"]],
)
W_O = [[0.5, -0.2, 1.1, 0.3], [0.1, 0.8, -0.4, 0.6], [-0.3, 0.7, 0.2, 1.0], [0.9, -0.5, 0.3, -0.8]]


def product(a: list[list[str]], b: list[list[str]]) -> list[list[Fraction]]:
    return [
        [
            sum((Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True)), Fraction(0))
            for column in zip(*b, strict=True)
        ]
        for row in a
    ]


def measure() -> Finding:
    right = [product(X, W) for W in W_Q]
    entries = [
        (exact, Fraction(text))
        for products, printed in zip(right, PRINTED, strict=True)
        for row, texts in zip(products, printed, strict=True)
        for exact, text in zip(row, texts, strict=True)
    ]
    agree = sum(abs(exact - printed) <= Fraction("0.005") for exact, printed in entries)
    q = torch.tensor(
        [[[float(x) for x in row] for row in products] for products in right], dtype=torch.float64
    )
    heads = regard.attention(q, q, q)  # (2 heads, 2 tokens, 2)
    out = heads.movedim(0, 1).flatten(1) @ torch.tensor(W_O, dtype=torch.float64)
    exact = [[[float(x) for x in row] for row in products] for products in right]
    return Finding(
        claim="the values of X W_1^Q and X W_2^Q in the worked example",
        verdict=verdict(agree == len(entries)),
        measured=f"{agree} of the {len(entries)} printed entries follow from the printed matrices",
        correct=f"X W_1^Q = {exact[0]}, X W_2^Q = {exact[1]}",
        numbers={
            "X W_1^Q": exact[0],
            "printed for head 1": PRINTED[0],
            "X W_2^Q": exact[1],
            "printed for head 2": PRINTED[1],
            "entries that agree": agree,
            "Concat(heads) W^O with K = V = Q": out.tolist(),
        },
    )
