"""Draws docs/images: `python tools/docs/pictures.py`. The files are reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import additive_picture
import approximations
import evidence_picture
import explanations
import scaling_out
import seeing
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor

import regard
from regard import masks as M, see

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = DOCS / "images"
NOTHING, SEEN, INK = "#f3efe6", "#14508c", "#33312c"
UNSIGNED: dict[str, Any] = {"Software": None}  # files do not depend on matplotlib's version
L = 16
IDS = torch.tensor([0] * 5 + [1] * 7 + [2] * 4)

ATOMS: dict[str, M.Mask] = {
    "causal": M.Causal(),
    "window": M.Window(left=3, right=0),
    "window-both": M.Window(2, 2),
    "lengths": M.Lengths(11),
    "documents": M.Documents(IDS),
    "prefix": M.Prefix(4),
    "global": M.Global([0, 8]),
    "random-blocks": M.RandomBlocks(2, 2, seed=3),
    "dilated": M.Dilated(3),
    "dense": M.Dense(torch.rand(L, L, generator=torch.Generator().manual_seed(3)) < 0.5),
    "blocks": M.Blocks(torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]]).bool(), 4),
    "not": ~M.Window(2, 2),
    "documents-causal": M.Documents(IDS) & M.Causal(),
    "sliding": M.sliding(4),
    "streaming": M.streaming(4, sinks=2),
    "prefix-lm": M.prefix_lm(5),
    "chunked": M.chunked(4, L),
    "longformer": M.longformer(5, global_tokens=[0]),
    "bigbird": M.bigbird(2, window=3, random=1, global_blocks=1, seed=1),
}
HERO = {
    "Causal()": "causal",
    "sliding(4)": "sliding",
    "Documents(ids) & Causal()": "documents-causal",
    "longformer(5, [0])": "longformer",
    "streaming(4, sinks=2)": "streaming",
    "Dilated(3)": "dilated",
}


def pixels(mask: M.Mask, size: int = 6) -> Tensor:
    """Returns an image (16 * size, 16 * size, 3) with one square for each pair of query and key."""
    colours = torch.tensor([to_rgb(NOTHING), to_rgb(SEEN)])
    squares = colours[mask.to_dense(L, L).expand(1, 1, L, L)[0, 0].long()]
    image = squares.repeat_interleave(size, 0).repeat_interleave(size, 1)
    image[::size] = image[:, ::size] = torch.ones(3)
    return image


def small_pictures() -> None:
    """Draws one picture for each mask, for the tables of docs/masks.md."""
    for name, mask in ATOMS.items():
        imsave(IMAGES / f"{name}.png", pixels(mask).numpy(), metadata=UNSIGNED)


def hero() -> None:
    """Draws six masks in a row, for the top of docs/masks.md."""
    figure = Figure(figsize=(12, 2.3), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(h_pad=0.1)
    for axes, (title, name) in zip(figure.subplots(1, len(HERO)), HERO.items(), strict=True):
        axes.imshow(pixels(ATOMS[name], 12).numpy(), interpolation="nearest")
        axes.set_title(title, fontsize=9, color=INK, family="monospace")
        bare(axes)
    figure.savefig(IMAGES / "masks.png", dpi=80, metadata=UNSIGNED)


def alignment() -> None:
    """Draws the causal mask of three queries and eight keys at two offsets."""
    figure = Figure(figsize=(8, 2.0), layout="constrained", facecolor="white")
    titles = "offset=None: Lk - Lq, decoding", "offset=0: is_causal of PyTorch"
    for axes, title, offset in zip(figure.subplots(1, 2), titles, (None, 0), strict=True):
        visible = M.Causal().to_dense(3, 8, offset)
        colours = torch.tensor([to_rgb(NOTHING), to_rgb(SEEN)])[visible.long()]
        axes.imshow(colours.numpy())
        axes.set_xticks([x - 0.5 for x in range(9)], minor=True)
        axes.set_yticks([y - 0.5 for y in range(4)], minor=True)
        axes.grid(which="minor", color="white")
        axes.tick_params(which="minor", length=0)
        axes.set_title(title, fontsize=10, color=INK)
        axes.set_xticks(range(8), [f"k{j}" for j in range(8)], fontsize=8)
        axes.set_yticks(range(3), [f"q{i}" for i in range(3)], fontsize=8)
        axes.tick_params(length=0, colors=INK)
        axes.spines[:].set_visible(False)
    figure.savefig(IMAGES / "alignment.png", dpi=80, metadata=UNSIGNED)


def linear() -> None:
    """Draws the weights of softmax and linear attention: their outputs for v = identity."""
    torch.manual_seed(4)
    n, options = 24, {"feature_map": "elu+1", "normalize": True}
    q, k, v = torch.randn(1, n, 8), torch.randn(1, n, 8), torch.eye(n)[None]
    rules = {
        "softmax": regard.attention(2 * q, 2 * k, v, mask=M.Causal()),
        "elu+1, normalized": regard.linear_attention(q, k, v, **options),
        "log_decay=-0.3": regard.linear_attention(q, k, v, log_decay=-0.3, **options),
        "unit, beta=0.9 (delta rule)": regard.linear_attention(q, k, v, feature_map="unit", beta=0.9),
    }
    figure = Figure(figsize=(11, 3.0), layout="constrained", facecolor="white")
    for axes, (title, weights) in zip(figure.subplots(1, len(rules)), rules.items(), strict=True):
        top = float(weights.abs().max())
        axes.imshow(weights[0].numpy(), cmap="RdBu", vmin=-top, vmax=top, interpolation="nearest")
        axes.set_title(title, fontsize=9, color=INK, family="monospace")
        bare(axes)
    figure.savefig(IMAGES / "linear.png", dpi=80, metadata=UNSIGNED)


def shapes() -> None:
    layer = regard.nn.Attention(512, 8, device="meta")
    for name, dark in (("shapes", False), ("shapes-dark", True)):
        see.shapes(layer, 10, dark=dark).savefig(IMAGES / f"{name}.png", dpi=100, metadata=UNSIGNED)


def bare(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    small_pictures()
    hero()
    alignment()
    linear()
    shapes()
    approximations.main(IMAGES)
    explanations.main(IMAGES)
    additive_picture.main(IMAGES)
    evidence_picture.main(IMAGES)
    scaling_out.main(IMAGES)
    seeing.main(IMAGES)


if __name__ == "__main__":
    main()
