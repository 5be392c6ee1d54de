"""Claim: Output = sum_i alpha_ij V_j. `regard claims sum_index`

alpha_ij is the weight of query i on key j, so the output of query i is the sum over keys j. The
printed sum runs over queries i: it multiplies V_j by the total weight that key j receives. If the
indices of alpha are exchanged (alpha_ij as the weight of query j on key i), V_j is still the value
of the wrong token. The experiment evaluates both readings as they are printed.
"""

from __future__ import annotations

import torch

import regard

from .finding import Finding, verdict
from .formula import relative, weights


def measure(n: int = 11, d: int = 16) -> Finding:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, n, d, generator=generator, dtype=torch.float64)
    exact = regard.attention(q, k, v)[0]
    alpha = weights(q, k)[0]
    readings = {
        "sum over i of alpha_ij V_j": torch.einsum("ij,jd->jd", alpha, v[0]),
        "the same, alpha_ij of query j and key i": torch.einsum("ji,jd->jd", alpha, v[0]),
        "sum over j of alpha_ij V_j": torch.einsum("ij,jd->id", alpha, v[0]),
    }
    errors = {name: relative(out, exact) for name, out in readings.items()}
    first, second, right = errors.values()
    return Finding(
        claim="Output = sum_i alpha_ij V_j",
        verdict=verdict(min(first, second) < 1e-9),
        measured=f"relative error {first:.2f}; with the indices of alpha exchanged {second:.2f}",
        correct=f"Output_i = sum_j alpha_ij V_j, with relative error {right:.0e}",
        numbers={f"relative error, {name}": error for name, error in errors.items()},
    )
