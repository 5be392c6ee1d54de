"""Maps: one head, all heads, entropy. Beyond a limit cells are blocks, whose mass is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import facts
from .._tools.arguments import count
from . import _style
from ._capture import Capture
from ._layer import Head, Layer
from ._style import MIXED, ROLE_COLOURS, Palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 256  # of a map of blocks, each way
MOST_LABELS = 64
THUMBNAIL = 64
SIDE, TALL = 0.88, 1.1  # of a thumbnail in a grid with columns of 1, and the distance of its rows


class Cells(NamedTuple):
    """What a map shows: weights, or their mean over the queries of a block, summed over its keys."""

    values: Tensor  # (rows, columns)
    block: int

    @property
    def exactness(self) -> str:
        if self.block == 1:
            return "exact"
        return f"exact at block resolution: a cell is {self.block} queries x {self.block} keys"


def heatmap(head: Head, *, limit: int = 512, dark: bool = False, path: _style.Path = None) -> Figure:
    """Which query (row) attends to which key (column) in one head.

    Colours go by the root of the weight, so that small ones show; the scale beside has the numbers. Beyond
    `limit` tokens a cell is a block: the mass that a query of the block gives to its keys, on average.
    """
    count("limit", limit, 1)
    colours = _style.palette(dark)
    cells = _cells(head, limit)
    nq, nk = len(head.tokens), len(head.key_tokens)
    side = 5.2 if cells.block > 1 else min(7.2, max(3.0, 0.32 * max(nq, nk)))
    tall = side * min(2.0, max(0.15, nq / nk))
    figure = _style.new_figure(side + 2.0, tall + 1.4, colours)
    axes = figure.subplots()
    _style.dress(axes, colours)
    image = _paint(axes, cells, (-0.5, -0.5), 1.0, colours)
    axes.set(xlim=(-0.5, nk - 0.5), ylim=(nq - 0.5, -0.5))
    if cells.block == 1 and max(nq, nk) <= MOST_LABELS:
        _label(axes, head)
    axes.set_xlabel("key: what is attended to", color=colours.ink, fontsize=9)
    axes.set_ylabel("query: who attends", color=colours.ink, fontsize=9)
    _style.title(figure, f"{head.title} · {_role(head)}", f"{nq} x {nk} tokens, {cells.exactness}", colours)
    ticks = [0, 0.05, 0.2, 0.5, 1]
    _style.bar(figure, image, axes, ticks, "weight" if cells.block == 1 else "mass", colours)
    return _style.finished(figure, path)


def grid(seen: Capture, *, sample: int = 0, dark: bool = False, path: _style.Path = None) -> Figure:
    """Every head of every layer as a small map, with its role as the colour of the frame."""
    check_recorded("grid", seen)
    colours, columns = _style.palette(dark), max(layer.heads for layer in seen)
    figure = _style.new_figure(max(4.4, 0.86 * columns + 0.7), 0.98 * len(seen) + 0.9, colours)
    axes = figure.subplots()
    used = set()
    for row, layer in enumerate(seen):
        for number, cells in enumerate(_thumbnails(layer, sample)):
            used.add(_thumb(axes, layer.head(number, sample), cells, (number, row), colours))
    _style.dress(axes, colours)
    axes.set(xlim=(-0.06, columns - 0.06), ylim=(len(seen) * TALL, -0.06), aspect="equal")
    axes.xaxis.tick_top()
    axes.set_xticks([x + 0.44 for x in range(columns)], [f"head {x}" for x in range(columns)])
    axes.set_yticks([y * TALL + 0.44 for y in range(len(seen))], [f"layer {y}" for y in range(len(seen))])
    _legend(figure, used, colours)
    return _style.finished(figure, path)


def entropy_map(seen: Capture, *, sample: int = 0, dark: bool = False, path: _style.Path = None) -> Figure:
    """How spread each head is: 0 looks at one key, 1 at all keys alike. Mean over queries."""
    colours, rows = _style.palette(dark), check_recorded("entropy_map", seen).entropy_map(sample)
    widest = max(map(len, rows))
    table = torch.full((len(rows), widest), torch.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    figure = _style.new_figure(max(4.0, 0.5 * widest + 1.9), max(2.2, 0.42 * len(rows) + 1.2), colours)
    axes = figure.subplots()
    image = axes.imshow(table.numpy(), cmap=_style.colormap(colours), vmin=0, vmax=1, aspect="auto")
    for y, x in (table.isfinite()).nonzero().tolist():
        value = table[y, x].item()
        ink = colours.ramp[0] if value > 0.5 else colours.ramp[-1]
        axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    _style.dress(axes, colours)
    axes.set_xticks(range(widest))
    axes.set_yticks(range(len(rows)))
    axes.set_xlabel("head", color=colours.ink, fontsize=9)
    axes.set_ylabel("layer", color=colours.ink, fontsize=9)
    below = "0: one key, 1: all allowed keys alike; mean over queries, exact"
    _style.title(figure, "Entropy of every head", below, colours)
    _style.bar(figure, image, axes, (0, 0.5, 1), "entropy", colours)
    return _style.finished(figure, path)


def check_recorded(name: str, seen: Capture) -> Capture:
    if not len(seen):
        raise ValueError(f"{name}: expected a capture with layers, got one that has recorded nothing")
    return seen


def _cells(head: Head, limit: int) -> Cells:
    longest = max(len(head.tokens), len(head.key_tokens))
    if longest <= limit:
        return Cells(head.weights(), 1)
    return _blocks(head.layer, longest, min(limit, MOST_CELLS), head.sample)[head.index]


def _thumbnails(layer: Layer, sample: int) -> list[Cells]:
    return _blocks(layer, max(layer.shape[2:]), THUMBNAIL, sample)


def _blocks(layer: Layer, longest: int, most: int, sample: int) -> list[Cells]:
    """For each head, at most `most` cells each way: the mass of a block over the number of its queries."""
    block = 1
    while -(-longest // block) > most:
        block *= 2
    mass = layer.fact(facts.BlockMass(block)).levels[0][sample]  # (Hq, nq, nk)
    starts = torch.arange(mass.shape[-2]) * block
    counts = (len(layer.texts(sample)) - starts).clamp(1, block)
    return [Cells(each / counts[:, None], block) for each in mass]


def _paint(axes: Any, cells: Cells, corner: tuple[float, float], token: float, colours: Palette) -> Any:
    """From the upper left corner on, each token so wide. The last block may reach beyond the last token."""
    from matplotlib.colors import PowerNorm

    (x, y), (rows, columns), cell = corner, cells.values.shape, cells.block * token
    return axes.imshow(
        cells.values.clamp(0, 1).numpy(), cmap=_style.colormap(colours), norm=PowerNorm(0.5, 0, 1),
        extent=(x, x + columns * cell, y + rows * cell, y), interpolation="nearest", aspect="equal",
    )  # fmt: skip


def _label(axes: Any, head: Head) -> None:
    nq, nk = len(head.tokens), len(head.key_tokens)
    size = 9 if max(nq, nk) <= 24 else 7 if max(nq, nk) <= 40 else 5.5
    axes.set_xticks(
        range(nk), _style.labels(head.key_tokens), rotation=55, ha="right", rotation_mode="anchor",
        fontsize=size, parse_math=False,
    )  # fmt: skip
    axes.set_yticks(range(nq), _style.labels(head.tokens), fontsize=size, parse_math=False)


def _role(head: Head) -> str:
    role = head.role
    return "mixed" if role is None else str(role)


def _thumb(axes: Any, head: Head, cells: Cells, at: tuple[int, int], colours: Palette) -> str:
    """Paint one small map, framed and named by its role; the name."""
    from matplotlib.patches import Rectangle

    x, y = at[0], at[1] * TALL
    nq, nk = len(head.tokens), len(head.key_tokens)
    token = SIDE / max(nq, nk)
    image = _paint(axes, cells, (x, y), token, colours)
    role = head.role
    name = "mixed" if role is None else role.name
    frame = ROLE_COLOURS.get(name, MIXED)
    border = Rectangle((x, y), nk * token, nq * token, fill=False, edgecolor=frame, linewidth=1.8)
    image.set_clip_path(axes.add_patch(border))
    short = name if role is None else f"{SHORT.get(name, name)} {role.score:.2f}"
    below = (x + nk * token / 2, y + nq * token + 0.03)
    text = axes.text(*below, short, ha="center", va="top", fontsize=5.5, color=colours.ink)
    for artist in (image, border, text):  # all lie inside the axes: half of the time of a layout
        artist.set_in_layout(False)
    return name


SHORT = {"previous token": "previous", "delimiter or sink": "delimiter", "fixed offset": "offset"}


def _legend(figure: Figure, used: set[str], colours: Palette) -> None:
    from matplotlib.patches import Patch

    names = [name for name in (*ROLE_COLOURS, "mixed") if name in used]
    patches = [Patch(color=ROLE_COLOURS.get(name, MIXED), label=name) for name in names]
    fitting = int(figure.get_figwidth() / 1.4)
    figure.legend(
        handles=patches, loc="outside lower center", ncols=fitting, frameon=False, fontsize=8,
        labelcolor=colours.ink,
    )  # fmt: skip
