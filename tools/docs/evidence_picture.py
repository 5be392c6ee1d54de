"""Draws the picture of docs/evidence.md for `pictures.py`: the facts of one head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from torch import Tensor

import regard
from regard import masks as M

NOTHING, SEEN, INK = "#f3efe6", "#14508c", "#33312c"
UNSIGNED: dict[str, Any] = {"Software": None}  # files do not depend on matplotlib's version
TOKENS, BLOCK = 192, 6
SHADES = LinearSegmentedColormap.from_list("weights", [NOTHING, "#8fb3d0", SEEN, "#081d33"])
WANT = (
    regard.Rows(range(TOKENS)), regard.BlockMass(BLOCK), regard.BlockMax(BLOCK), regard.ColumnMass(),
    regard.Entropy(), regard.DistanceHistogram(),
)  # fmt: skip


def main(images: Path) -> None:
    evidence().savefig(images / "evidence.png", dpi=80, metadata=UNSIGNED)


def scores() -> Tensor:
    """Returns scores of a head that attends to the previous token and to token 0.

    One query also attends to a token far back.
    """
    s = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(4))
    s.diagonal(-1).add_(6)
    s[:, 0] += 5
    s[150, 37] += 12
    return s


def evidence() -> Figure:
    zeros = torch.zeros(1, 1, TOKENS, 1)  # the bias alone gives the scores
    rows, mass, maximum, column, entropy, histogram = regard.evidence(
        zeros, zeros, None, *WANT, bias=scores(), mask=M.Causal()
    )
    figure = Figure(figsize=(10.5, 5.6), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 3, height_ratios=(2, 1))
    squares(axes[0, 0], rows[0, 0], f"the weights, {TOKENS} x {TOKENS}")
    squares(axes[0, 1], mass.levels[0][0, 0] / BLOCK, f"BlockMass({BLOCK}) / {BLOCK}")
    squares(axes[0, 2], maximum.levels[0][0, 0], f"BlockMax({BLOCK})")
    track(axes[1, 0], torch.arange(TOKENS), column[0, 0], "ColumnMass()", "key")
    track(axes[1, 1], torch.arange(TOKENS), entropy.normalized[0, 0], "Entropy(), normalised", "query")
    near = histogram.distances.ge(0) & histogram.distances.le(40)
    track(
        axes[1, 2], histogram.distances[near], histogram.mass[0, 0, near], "DistanceHistogram()", "distance"
    )
    return figure


def squares(axes: Axes, x: Tensor, title: str) -> None:
    scale = LogNorm(1e-4, 1)
    axes.imshow(x.clamp(min=1e-4).numpy(), cmap=SHADES, norm=scale, interpolation="nearest")
    axes.set_title(title, color=INK, fontsize=11)
    axes.set_xlabel("key", color=INK)
    axes.set_ylabel("query", color=INK)
    axes.set_xticks([])
    axes.set_yticks([])


def track(axes: Axes, at: Tensor, x: Tensor, title: str, unit: str) -> None:
    axes.fill_between(at.numpy(), x.numpy(), step="mid", color=SEEN, linewidth=0)
    axes.set_title(title, color=INK, fontsize=11)
    axes.set_xlabel(unit, color=INK)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
