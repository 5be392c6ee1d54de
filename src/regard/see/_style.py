"""How figures look: two palettes, told apart by lightness alone, and how they are written."""

from __future__ import annotations

import functools
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ._tokens import label

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

DPI, TITLE = 160, 9.5  # points of the title
Path = str | os.PathLike[str] | None


class Palette(NamedTuple):
    paper: str
    ink: str
    faint: str  # lines that should not be noticed
    accent: str
    ramp: tuple[str, ...]  # from nothing to all, lightness monotone


LIGHT = Palette(
    "#ffffff", "#2b2a27", "#d9d5cb", "#d55e00", ("#f6f3ea", "#b9d3e3", "#5b9bc8", "#14508c", "#0a1f44")
)
DARK = Palette(
    "#14161a", "#e9e6df", "#3a3e46", "#f0a03c", ("#1d2026", "#1f4468", "#2f7fb3", "#8cc7e0", "#fdf6d8")
)
# Okabe and Ito's colours, which every kind of colour vision tells apart; black is left to the ink.
ROLE_COLOURS = {
    "induction": "#d55e00",
    "duplicate": "#cc79a7",
    "previous token": "#0072b2",
    "fixed offset": "#56b4e9",
    "broad": "#009e73",
    "delimiter or sink": "#e69f00",
    "sharp": "#8a6fb5",
}
MIXED = "#8c8c8c"


def palette(dark: bool) -> Palette:
    return DARK if dark else LIGHT


def new_figure(width: float, height: float, colours: Palette) -> Figure:
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("pictures of attention need matplotlib: pip install 'regard[plot]'") from error
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    return Figure(figsize=(width, height), layout=layout, facecolor=colours.paper)


def finished(figure: Figure, path: Path) -> Figure:
    """Written if there is a path: PNG, or PDF and SVG with text as text."""
    from matplotlib import rc_context

    if path is not None:
        with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
            # No date and no version: the same bytes on every run.
            same = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
            kind = os.fspath(path).rpartition(".")[2].lower()
            figure.savefig(path, dpi=DPI, metadata=same.get(kind))
    return figure


@functools.cache
def colormap(colours: Palette) -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", colours.ramp)


def dress(axes: Any, colours: Palette, *, frame: bool = False) -> None:
    axes.set_facecolor(colours.paper)
    axes.tick_params(colors=colours.ink, labelsize=8, length=2 if frame else 0)
    for side, spine in axes.spines.items():
        spine.set_visible(frame and side in ("left", "bottom"))
        spine.set_color(colours.faint)


def title(figure: Figure, text: str, below: str, colours: Palette) -> None:
    """What is shown, and under it how to read it; lines are broken to fit."""
    most = int((figure.get_figwidth() - 0.3) * 72 / (0.58 * TITLE))
    lines = [line for part in (text, below) for line in textwrap.wrap(part, most)]
    figure.suptitle("\n".join(lines), x=0.02, ha="left", fontsize=TITLE, color=colours.ink, parse_math=False)


def labels(tokens: Sequence[str]) -> list[str]:
    """Tokens as the font can show them: a letter that it has not is written as an escape."""
    from matplotlib.font_manager import FontProperties, findfont

    has = _glyphs(findfont(FontProperties()))
    return [
        "".join(x if ord(x) in has else x.encode("unicode_escape").decode() for x in label(token))
        for token in tokens
    ]


@functools.cache
def _glyphs(font: str) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    return frozenset(get_font(font).get_charmap())


def bar(figure: Figure, image: Any, axes: Any, ticks: Sequence[float], name: str, colours: Palette) -> None:
    """The scale of colours beside a map, with numbers as they are."""
    scale = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02, aspect=24, ticks=list(ticks))
    scale.ax.set_yticklabels([f"{tick:.3g}" for tick in ticks], color=colours.ink, fontsize=8)
    scale.ax.tick_params(colors=colours.ink, length=0)
    scale.set_label(name, fontsize=8, color=colours.ink)
    scale.outline.set_visible(False)
