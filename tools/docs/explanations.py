"""Draws the pictures of docs/why.md for `pictures.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from approximations import ACCENT, INK, SEEN, UNSIGNED, labelled
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "why"))
import fixed_weights as fixed_weights_experiment
import heads as heads_experiment
import qkv as qkv_experiment
import scale as scale_experiment
import sequences as sequences_experiment
import softmax as softmax_experiment


def main(images: Path) -> None:
    for draw in (scale, softmax, qkv, fixed_weights, heads, sequences):
        draw().savefig(images / f"why-{draw.__name__.replace('_', '-')}.png", dpi=80, metadata=UNSIGNED)


def panels(count: int, width: float = 9.0, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, 3.2), layout="constrained", facecolor="white")
    return figure, figure.subplots(1, count, **options)


def curves(
    axes: Any, x: Any, by_name: dict[str, Any], colours: tuple[str, ...] = (ACCENT, SEEN, INK)
) -> None:
    for (name, values), colour in zip(by_name.items(), colours, strict=False):
        axes.plot(x, values, color=colour, marker=".", label=name)
    axes.legend(fontsize=8, frameon=False)


def scale() -> Figure:
    points = scale_experiment.measure()
    figure, (left, right) = panels(2)
    names = {"plain": "q.k", "scaled": "q.k / sqrt(d_k)"}
    for axes, field in ((left, "largest"), (right, "slope")):
        values = {
            text: [getattr(row[name], field) for row in points.values()] for name, text in names.items()
        }
        curves(axes, list(points), values)
        axes.set_xscale("log", base=2)
    right.set_yscale("log")
    labelled(left, "largest of 64 weights, median", "d_k", "")
    labelled(right, "slope of the softmax, median", "d_k", "")
    return figure


def softmax() -> Figure:
    recalled = softmax_experiment.measure()
    figure, (left, right) = panels(2)
    names = list(next(iter(recalled.values())))
    shares = {name: [100 * row[name] for row in recalled.values()] for name in names}
    curves(left, list(recalled), shares, (SEEN, ACCENT))
    left.set_xscale("log", base=2)
    labelled(left, "values recalled, 32 channels", "keys", "%")
    sharpness = torch.linspace(0, 4, 100)
    weights = (sharpness[:, None] * torch.tensor([1.0, 2.0, 3.0])).softmax(-1)
    for score, (column, colour) in enumerate(zip(weights.T, (INK, ACCENT, SEEN), strict=True), 1):
        right.plot(sharpness, column, color=colour, label=f"score {score}")
    right.legend(fontsize=8, frameon=False)
    labelled(right, "weights of three scores", "scale: from the mean to the maximum", "")
    return figure


def heat(axes: Any, weights: Tensor, title: str) -> None:
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    labelled(axes, title, "keys", "queries")


def qkv() -> Figure:
    target = torch.eye(qkv_experiment.N)[qkv_experiment.NEXT]
    figure, axes = panels(3)
    heat(axes[0], target, "target: the next token")
    for panel, (name, tied) in zip(axes[1:], (("W_Q and W_K", False), ("W_Q = W_K", True)), strict=True):
        heat(panel, qkv_experiment.train(tied), f"learned, {name}")
    return figure


def fixed_weights() -> Figure:
    experiment, content = fixed_weights_experiment, "by content"
    models = {name: experiment.train(content, mixer) for name, mixer in experiment.MIXERS.items()}
    figure, axes = panels(5, 14.0)
    shares = {name: 100 * (experiment.answered(model, content) or 0) for name, model in models.items()}
    shares["most frequent\nsymbol"] = 100 * experiment.guessed(content)
    names = [name.replace(" ", "\n", 1) for name in shares]
    bars = axes[0].bar(names, list(shares.values()), color=[ACCENT, SEEN, INK])
    axes[0].bar_label(bars, fmt="%.0f", fontsize=8, color=INK)
    axes[0].set_ylim(0, 115)
    labelled(axes[0], "right answers, by content", "", "%")
    tokens, _ = experiment.sample(content, 2, experiment.N, torch.Generator().manual_seed(2))
    with torch.no_grad():
        heat(axes[1], models["fixed weights"].weights(tokens[:1]), "fixed weights")
        for number, sequence in enumerate(tokens.split(1), 1):
            heat(axes[1 + number], models["attention"].weights(sequence), f"attention, sequence {number}")
    lengths = [2**i for i in range(6, 15)]
    counts = [experiment.parameters(n) for n in lengths]
    curves(axes[4], lengths, {name: [row[name] for row in counts] for name in counts[0]})
    axes[4].loglog()
    labelled(axes[4], "parameters, d = 512", "tokens n", "")
    return figure


def heads() -> Figure:
    layers = {count: heads_experiment.train(count) for count in (1, 2, 4)}
    figure, axes = panels(6, 14.0)
    shares = [100 * heads_experiment.named(layer) for layer in layers.values()]
    bars = axes[0].bar([str(count) for count in layers], shares, color=SEEN)
    axes[0].bar_label(bars, fmt="%.0f %%", fontsize=8, color=INK)
    labelled(axes[0], "four tokens recalled", "heads", "")
    tokens = torch.randint(
        heads_experiment.KINDS, (1, heads_experiment.L), generator=torch.Generator().manual_seed(2)
    )
    with torch.no_grad():
        heat(axes[1], layers[1].weights(tokens)[0, 0], "the only head")
        for head, weights in enumerate(layers[4].weights(tokens)[0]):
            heat(axes[2 + head], weights, f"head {head} of 4")
    return figure


def sequences() -> Figure:
    figure, (left, right) = panels(2)
    n, lengths = 128, [2**i for i in range(6, 15)]
    for (name, make), colour in zip(sequences_experiment.MAKERS.items(), (ACCENT, INK, SEEN), strict=True):
        curve = sequences_experiment.influence(make, n)
        left.plot(curve / curve[0], color=colour, label=name)
        work = [sequences_experiment.multiplications(length, 512)[name] for length in lengths]
        right.plot(lengths, work, color=colour, label=name)
    left.set_yscale("log")
    left.set_ylim(1e-12, 10)
    right.loglog(base=2)
    right.set_yscale("log")
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False)
    labelled(left, "influence of a token on the last output", "distance in tokens", "")
    labelled(right, "multiplications of a layer, width 512", "tokens", "")
    return figure
