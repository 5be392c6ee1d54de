"""Drawings of masks: text for the terminal, HTML for notebooks, matplotlib figures."""

from __future__ import annotations

import html as escape_html
import os
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import Offset
from ._mask import Mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_SIZE = 32
# Blue and warm white differ in lightness, so they stay distinct under every kind of colour blindness.
NOTHING, SEEN, SELF, INK = "#f3efe6", "#14508c", "#e69f00", "#33312c"
SHADES = ("· ", "░░", "▒▒", "▓▓", "██")


class Colours(NamedTuple):
    paper: str
    excluded: str
    allowed: str
    diagonal: str  # pairs with key position = query position
    ink: str


LIGHT = Colours("white", NOTHING, SEEN, SELF, INK)
DARK = Colours("#14161a", "#23262d", "#8cc7e0", "#f0a03c", "#e9e6df")


class Picture(NamedTuple):
    title: str
    allowed: Tensor  # bool (Lq, Lk)
    start: int  # position of query 0

    @property
    def caption(self) -> str:
        Lq, Lk = self.allowed.shape
        density = 100 * self.allowed.double().mean().item()
        return f"{Lq} queries x {Lk} keys, offset {self.start}, {density:.1f} % may attend"


def picture(mask: Mask, Lq: int | None, Lk: int | None, offset: Offset, head: int, sample: int) -> Picture:
    """Evaluates a mask for one head of one sample. If Lq or Lk is None, uses default sizes."""
    Lq, Lk = _default_sizes(mask, Lq, Lk)
    if Lq < 1 or Lk < 1:
        raise ValueError(f"Lq and Lk: expected at least 1 to draw, got {Lq} and {Lk}")
    dense = mask.to_dense(Lq, Lk, offset).cpu()
    suffix = f" (head {head})" if dense.ndim > 2 and dense.shape[-3] > 1 else ""
    if dense.ndim > 2:
        dense = _pick(dense.movedim(-3, 0), "head", head)
    if dense.ndim > 2:
        dense = _pick(dense.flatten(0, -3), "sample", sample)
        suffix += f" (sample {sample})"
    return Picture(f"{mask!r}{suffix}", dense, _start(Lq, Lk, offset, sample))


def _default_sizes(mask: Mask, Lq: int | None, Lk: int | None) -> tuple[int, int]:
    mask_Lq, mask_Lk = mask._sizes()
    default_Lk = mask_Lk or Lq or mask_Lq or max(DEFAULT_SIZE, mask._max_length)
    Lk = default_Lk if Lk is None else Lk
    return (mask_Lq or Lk) if Lq is None else Lq, Lk


def _pick(dense: Tensor, name: str, index: int) -> Tensor:
    if len(dense) == 1:
        return dense[0]
    if not 0 <= index < len(dense):
        raise ValueError(f"{name}: expected 0 to {len(dense) - 1}, got {index}")
    return dense[index]


def _start(Lq: int, Lk: int, offset: Offset, sample: int) -> int:
    if isinstance(offset, Tensor):
        flat = offset.flatten()
        return int(flat[sample if len(flat) > 1 else 0])
    return Lk - Lq if offset is None else offset


def _cells(allowed: Tensor, max_cells: int) -> tuple[Tensor, int]:
    """Divides the matrix `allowed` into at most max_cells x max_cells square cells.

    Returns the share of allowed pairs in each cell, and the number of pairs along a cell's side.
    """
    step = -(-max(allowed.shape) // max_cells)
    shares = torch.nn.functional.avg_pool2d(allowed[None, None].double(), step, step, ceil_mode=True)
    return shares[0, 0], step


def text(image: Picture, width: int | None) -> str:
    width = width or min(shutil.get_terminal_size().columns, 100)
    Lq = len(image.allowed)
    margin = max(len(str(image.start)), len(str(image.start + Lq - 1))) + 1
    cells, step = _cells(image.allowed, max(1, (width - margin) // 2))
    lines = [image.title, image.caption, " " * margin + _ticks(cells.shape[1], step)]
    for number, shares in enumerate(cells.tolist()):
        label = str(image.start + number * step).rjust(margin - 1)
        lines.append(f"{label} {''.join(map(_shade, shares))}".rstrip())
    if step > 1:
        lines.append(f"{' ' * margin}each cell is {step} x {step} pairs: ██ all, ▓▒░ some, · none")
    return "\n".join(lines)


def _ticks(cells: int, step: int) -> str:
    """Returns the line of text with key positions that stands above the columns."""
    label_width = len(str(cells * step)) + 1
    spacing = max(5, -(-label_width // 2))
    return "".join(str(n * step).ljust(2 * spacing) for n in range(0, cells, spacing)).rstrip()


def _shade(share: float) -> str:
    """Returns the characters that draw a cell.

    A cell is drawn empty only if its share of allowed pairs is 0, and full only if it is 1.
    """
    if share in (0.0, 1.0):
        return SHADES[-1] if share else SHADES[0]
    return SHADES[1 + min(int(share * 3), 2)]


def html(image: Picture) -> str:
    """Returns the picture as an inline SVG, which needs no plotting package."""
    cells, _ = _cells(image.allowed, 96)
    rows, columns = cells.shape
    unit = max(3, min(14, 420 // max(rows, columns)))
    marks = "".join(
        f'<rect x="{c * unit}" y="{r * unit}" width="{unit}" height="{unit}" fill-opacity="{share:.2f}"/>'
        for r, line in enumerate(cells.tolist())
        for c, share in enumerate(line)
        if share > 0
    )
    size = f'width="{columns * unit}" height="{rows * unit}"'
    return (
        f'<figure style="margin:0;font-family:monospace"><div>{escape_html.escape(image.title)}</div>'
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="background:{NOTHING}">'
        f'<g fill="{SEEN}" stroke="{NOTHING}" stroke-width="0.5">{marks}</g></svg>'
        f"<figcaption>{escape_html.escape(image.caption)}</figcaption></figure>"
    )


def image(image: Picture, path: str | os.PathLike[str] | None, dark: bool = False) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("an image of a mask needs matplotlib: pip install regard[plot]") from error
    cells, _ = _cells(image.allowed, 1024)
    height = 5.2 * max(0.25, min(2.5, cells.shape[0] / cells.shape[1]))
    colours = DARK if dark else LIGHT
    figure = Figure(figsize=(5.8, height + 1.0), layout="constrained", facecolor=colours.paper)
    _paint(figure.subplots(), image, cells, colours)
    if path is not None:
        figure.savefig(path, dpi=160)
    return figure


def _paint(axes: Any, image: Picture, cells: Tensor, colours: Colours) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    Lq, Lk = image.allowed.shape
    edges = (-0.5, Lk - 0.5, image.start + Lq - 0.5, image.start - 0.5)
    ramp = LinearSegmentedColormap.from_list("regard", [colours.excluded, colours.allowed])
    axes.imshow(cells.numpy(), cmap=ramp, vmin=0, vmax=1, extent=edges, interpolation="nearest")
    if max(Lq, Lk) <= 64:
        _paint_details(axes, image, colours)
    axes.set_xlabel("key position", color=colours.ink)
    axes.set_ylabel("query position", color=colours.ink)
    axes.set_title(_shortened(image.title) + "\n" + image.caption, fontsize=9, color=colours.ink, loc="left")
    axes.tick_params(colors=colours.ink, labelsize=8, length=2)
    axes.spines[:].set_visible(False)


def _paint_details(axes: Any, image: Picture, colours: Colours) -> None:
    """Draws grid lines between pairs, and a dot where query and key have the same position."""
    Lq, Lk = image.allowed.shape
    diagonal = [p for p in range(image.start, image.start + Lq) if 0 <= p < Lk]
    axes.set_xticks([j - 0.5 for j in range(1, Lk)], minor=True)
    axes.set_yticks([image.start + i - 0.5 for i in range(1, Lq)], minor=True)
    axes.grid(which="minor", color=colours.paper, linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    axes.scatter(diagonal, diagonal, s=max(2.0, 220 / max(Lq, Lk)), color=colours.diagonal, lw=0, zorder=3)


def _shortened(title: str, max_length: int = 76) -> str:
    return title if len(title) <= max_length else title[: max_length - 1] + "…"
