"""Draws the picture of docs/additive.md for `pictures.py`: additive beside dot-product attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import explanations
import torch
from approximations import ACCENT, SEEN, UNSIGNED, labelled
from explanations import curves, fixed_weights_experiment as names_experiment, heat
from torch import Tensor

import regard
from regard.nn import AdditiveAttention

FACTORS = [2**i for i in range(8)]


def main(images: Path) -> None:
    figure, (one, other, largest) = explanations.panels(3, 10.0)
    draw_alignments(one, other)
    draw_largest_weights(largest)
    figure.savefig(images / "additive-layer.png", dpi=80, metadata=UNSIGNED)


def draw_alignments(one: Any, other: Any) -> None:
    """Draws the weights that both layers learn for the task by content, in the same sequence."""
    experiment, task = names_experiment, "by content"
    mixers = experiment.MIXERS | {"additive": lambda: AdditiveAttention(experiment.WIDTH, hidden=32)}
    tokens, _ = experiment.sample(task, 1, experiment.N, torch.Generator().manual_seed(2))
    for axes, name in ((one, "additive"), (other, "attention")):
        model = experiment.train(task, mixers[name])
        share = experiment.answered(model, task)
        with torch.no_grad():
            title = "dot product" if name == "attention" else name
            heat(axes, model.weights(tokens), f"{title}, trained: {share:.0%} right")


def draw_largest_weights(axes: Any) -> None:
    """Draws the largest weight of 64 keys, as queries and keys are multiplied by a factor."""
    torch.manual_seed(0)
    layer, q, k = AdditiveAttention(64), torch.randn(256, 64), torch.randn(64, 64)

    def additive(factor: int) -> Tensor:
        weights: Tensor = layer(factor * q, factor * k, return_weights=True)[1]
        return weights

    def dot(factor: int) -> Tensor:
        return regard.weights(factor * q, factor * k, k)

    with torch.no_grad():
        medians = {
            name: [float(weights(factor).amax(-1).median()) for factor in FACTORS]
            for name, weights in (("additive", additive), ("dot product", dot))
        }
    curves(axes, FACTORS, medians, (SEEN, ACCENT))
    axes.set_xscale("log", base=2)
    labelled(axes, "largest of 64 weights, median", "factor of queries and keys", "")
