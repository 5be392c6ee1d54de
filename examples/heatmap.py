"""A head that can be read: each word attends to what followed the same word before (an induction head).

The queries are the words, the keys are the words one position earlier, so a match points at the continuation.
A word that was not there before finds no match and rests on the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import regard
from regard import masks as M
from regard import scores

TEXT = "the old fox saw the young dog and the old fox ran past the young dog to the river"
INK, PAPER = "#33312c", "#fbf9f4"


def words_and_weights(text: str = TEXT) -> tuple[list[str], Tensor]:
    """The words, and the weights (L, L) of the head."""
    words = text.split()
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    x = torch.eye(len(number) + 1)[[number[word] for word in words]]  # (L, D), the last column is free
    k = x.roll(1, 0)
    k[0] = torch.eye(len(number) + 1)[-1]
    q = 7 * x
    q[:, -1] = 3.5
    bias = scores.Alibi(torch.tensor([0.08]))
    return words, regard.weights(q[None], k[None], x[None], mask=M.Causal(), bias=bias, scale=1.0)[0]


def draw(words: Sequence[str], weights: Tensor, path: Path) -> None:
    """Rows are the words that look, columns the words that are looked at; a dot marks the largest weight."""
    from matplotlib.figure import Figure

    L = len(words)
    figure = Figure(figsize=(7.6, 6.8), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    seen = weights.masked_fill(~M.Causal().to_dense(L, L), float("nan"))
    axes.set_facecolor(PAPER)
    image = axes.imshow(seen.sqrt().numpy(), cmap="cividis", vmin=0, vmax=1)
    axes.scatter(weights.argmax(-1), range(L), s=14, color=PAPER, edgecolors=INK, linewidths=0.6)
    axes.set_xticks(range(L), words, rotation=55, ha="right", rotation_mode="anchor", fontsize=9)
    axes.set_yticks(range(L), words, fontsize=9)
    axes.set_title("What followed this word before?  One causal head", loc="left", fontsize=11, color=INK)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    bar = figure.colorbar(image, shrink=0.7, pad=0.02, ticks=[0, 0.5**0.5, 1])
    bar.ax.set_yticklabels(["0", "0.5", "1"], color=INK, fontsize=8)
    bar.ax.set_title("weight", fontsize=8, color=INK, loc="left")
    bar.outline.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
