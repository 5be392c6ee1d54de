"""Draws the pictures of sparse patterns and random features for `pictures.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

import regard
from regard import features, masks as M
from regard.nn import LinformerAttention, LinformerProjection, PerformerAttention, block_table

NOTHING, SEEN, INK, ACCENT = "#f3efe6", "#14508c", "#33312c", "#c4572b"
UNSIGNED: dict[str, Any] = {"Software": None}  # files do not depend on matplotlib's version


def main(images: Path) -> None:
    for draw in (longformer, bigbird, linformer, performer):
        draw().savefig(images / f"{draw.__name__}-layer.png", dpi=80, metadata=UNSIGNED)


def longformer() -> Figure:
    L = 32
    titles = "window=9", "dilation=3", "window=9, global_tokens=[0, 20]"
    patterns = M.longformer(9), M.longformer(9, dilation=3), M.longformer(9, [0, 20])
    return squares(dict(zip(titles, (mask.to_dense(L, L) for mask in patterns), strict=True)))


def bigbird() -> Figure:
    def table(blocks: int, global_blocks: list[int]) -> Tensor:
        return block_table(blocks, 2, window=3, random=2, global_blocks=global_blocks, seed=1)

    both, etc = table(16, [0, -1]), table(17, [0])
    shown = {"ITC, head 0": both[0], "ITC, head 1": both[1], "ETC, one block beside": etc[0]}
    return squares(shown, "blocks of ")


def squares(matrices: dict[str, Tensor], of: str = "") -> Figure:
    """Draws bool matrices side by side."""
    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
    for axes, (title, visible) in zip(figure.subplots(1, len(matrices)), matrices.items(), strict=True):
        axes.pcolormesh(
            visible.numpy(), cmap=ListedColormap([NOTHING, SEEN]), edgecolors="white", linewidth=0.5, vmax=1
        )
        axes.invert_yaxis()
        axes.set_aspect("equal")
        labelled(axes, title, f"{of}keys", f"{of}queries")
    return figure


def linformer() -> Figure:
    """Draws the weights of one Linformer head as three matrices.

    They are the exact weights, the weights of the projected keys, and the weights that these imply
    for the original keys.
    """
    torch.manual_seed(3)
    L, D, rank = 32, 16, 8
    q, k, v = torch.randn(3, 1, 1, L, D)
    projection = LinformerProjection(L, rank)
    mixed, _ = projection(k, v)
    implied = LinformerAttention(D, 1, projection).attend(q, k, torch.eye(L)[None, None])
    panels = {
        "exact weights": (regard.weights(q, k, v), "keys"),
        "weights of 8 projected keys": (regard.weights(q, mixed, mixed), "projected keys"),
        "implied weights": (implied, "keys"),
    }
    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
    for axes, (title, (weights, keys)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        values = weights[0, 0].detach()
        limit = float(values.abs().max())
        axes.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        labelled(axes, title, keys, "queries")
    return figure


def performer() -> Figure:
    figure = Figure(figsize=(10, 3.2), layout="constrained", facecolor="white")
    maps, kernel, error = figure.subplots(1, 3)
    draw_features(maps)
    draw_kernel(kernel)
    draw_error(error)
    return figure


def draw_features(axes: Any) -> None:
    """Draws five Performer features phi(x) of a number x: bell curves around five numbers w."""
    x = torch.linspace(-3, 3, 200)[:, None]
    w = torch.tensor([[-2.0], [-1.0], [-0.3], [0.5], [1.4]])
    for curve in features.positive_features(x, w).T:
        axes.plot(x[:, 0], curve, color=SEEN)
    labelled(axes, "five features of one channel", "x", "phi(x)")


def draw_kernel(axes: Any) -> None:
    k = torch.linspace(-1.5, 1.5, 100)[:, None]
    q = torch.tensor([[1.0]])
    for m, alpha in ((4, 0.35), (16, 0.6), (256, 1.0)):
        w = features.orthogonal_gaussian(m, 1, generator=torch.Generator().manual_seed(5))
        estimate = features.positive_features(k, w) @ features.positive_features(q, w).T
        axes.plot(k[:, 0], estimate[:, 0], color=SEEN, alpha=alpha, label=f"m = {m}")
    axes.plot(k[:, 0], k[:, 0].exp(), color=ACCENT, linestyle="--", label="exp(q k)")
    axes.legend(fontsize=8)
    labelled(axes, "phi(q).phi(k), q = 1", "k", "")


def draw_error(axes: Any) -> None:
    """Draws Performer's error for several numbers of features: mean and deviation over seeds."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 256, 32)
    counts = [16, 32, 64, 128, 256, 512, 1024]
    errors = torch.tensor([[performer_error(m, seed, q / 2, k / 2, v) for seed in range(8)] for m in counts])
    axes.errorbar(counts, errors.mean(1), errors.std(1), color=SEEN, marker=".", capsize=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    labelled(axes, "relative output error", "features", "")


def performer_error(m: int, seed: int, q: Tensor, k: Tensor, v: Tensor) -> float:
    heads, D = q.shape[1], q.shape[3]
    module = PerformerAttention(heads * D, heads, features=m, seed=seed)
    return regard.compare_to_exact(module, q, k, v, weights=False).error


def labelled(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9, color=INK, family="monospace")
    axes.set_xlabel(x, fontsize=8, color=INK)
    axes.set_ylabel(y, fontsize=8, color=INK)
    axes.tick_params(labelsize=7, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
