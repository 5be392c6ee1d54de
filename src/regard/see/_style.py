"""The style of all figures: light and dark palettes, titles, labels, colour scales, saving."""

from __future__ import annotations

import functools
import os
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .._tools.arguments import describe
from ._fonts import advice, families
from ._tokens import escaped, label, shortened

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

DPI, TITLE = 160, 9.5  # TITLE: font size of titles in points
Path = str | os.PathLike[str] | None


class Palette(NamedTuple):
    paper: str
    ink: str
    faint: str  # axes and guide lines
    accent: str
    ramp: tuple[str, ...]  # colour scale from 0 to 1, with monotone lightness


LIGHT = Palette(
    "#ffffff", "#2b2a27", "#d9d5cb", "#d55e00", ("#f6f3ea", "#b9d3e3", "#5b9bc8", "#14508c", "#0a1f44")
)
DARK = Palette(
    "#14161a", "#e9e6df", "#3a3e46", "#f0a03c", ("#1d2026", "#1f4468", "#2f7fb3", "#8cc7e0", "#fdf6d8")
)
# The palette of Okabe and Ito without black, which is safe for colour-blind readers. "mixed" stands for
# heads without a role.
ROLE_COLOURS = {
    "induction": "#d55e00",
    "duplicate": "#cc79a7",
    "previous token": "#0072b2",
    "fixed offset": "#56b4e9",
    "broad": "#009e73",
    "delimiter or sink": "#e69f00",
    "sharp": "#8a6fb5",
    "mixed": "#8c8c8c",
}


class Drawing:
    """A figure with one plot, or the caller's axes `ax`, in the light or dark palette.

    If `frame` is True, the left and the bottom axis are drawn.
    """

    def __init__(
        self, width: float, height: float, dark: bool, ax: Any, path: Path, *, frame: bool = False
    ) -> None:
        try:
            from matplotlib.figure import Figure
            from matplotlib.layout_engine import ConstrainedLayoutEngine
        except ImportError as error:
            raise ImportError("pictures of attention need matplotlib: pip install 'regard[plot]'") from error
        self.colours = DARK if dark else LIGHT
        self.path, self.own = path, ax is None
        self._missing = ""  # characters that no installed font has
        if ax is None:
            layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
            ax = Figure(figsize=(width, height), layout=layout, facecolor=self.colours.paper).subplots()
        if not hasattr(ax, "imshow"):
            raise TypeError(f"ax: expected matplotlib axes, got {describe(ax)}")
        self.axes: Any = ax
        self.figure: Figure = ax.figure.figure  # the figure, also of axes in a SubFigure
        self.axes.set_facecolor(self.colours.paper)
        self.axes.tick_params(colors=self.colours.ink, labelsize=8, length=2 if frame else 0)
        for side, spine in self.axes.spines.items():
            spine.set_visible(frame and side in ("left", "bottom"))
            spine.set_color(self.colours.faint)

    def title(self, given: str | None, text: str, below: str = "") -> None:
        """Writes the title that the caller gave, or else the title `text` and the line `below`.

        Lines are wrapped to the width of the figure, or of the caller's axes.
        """
        width = self.figure.get_figwidth() * (1 if self.own else self.axes.get_position().width)
        columns = max(10, int((width - 0.3) * 72 / (0.58 * TITLE)))
        parts = (text, below) if given is None else given.splitlines()
        wrapped = "\n".join(line for part in parts for line in textwrap.wrap(part, columns))
        (lines,) = self._drawable([wrapped])
        style: dict[str, Any] = {"fontsize": TITLE, "color": self.colours.ink, "parse_math": False}
        if self.own:
            self.figure.suptitle(lines, x=0.02, ha="left", **style)
        else:
            self.axes.set_title(lines, loc="left", **style)

    def labels(self, tokens: Sequence[str]) -> list[str]:
        """Returns one label per token. Characters that no installed font has are escaped."""
        return list(map(shortened, self._drawable([label(token) for token in tokens])))

    def _drawable(self, texts: list[str]) -> list[str]:
        """Returns texts with escapes for characters that no installed font has.

        An SVG file keeps all characters, because its fonts are chosen where it is shown.
        """
        missing = "" if self._kind == "svg" else families(texts)[1]
        self._missing += missing
        return ["".join(escaped(letter, lambda x: x not in missing) for letter in text) for text in texts]

    @property
    def _kind(self) -> str:
        return "" if self.path is None else os.fspath(self.path).rpartition(".")[2].lower()

    def name_axes(self, x: str, y: str = "") -> None:
        self.axes.set_xlabel(x, color=self.colours.ink, fontsize=9)
        self.axes.set_ylabel(y, color=self.colours.ink, fontsize=9)

    def scale(self, image: Any, ticks: Sequence[float], name: str) -> None:
        """Draws the colour scale of an image beside the plot, with ticks and a name."""
        bar = self.figure.colorbar(image, ax=self.axes, shrink=0.6, pad=0.02, aspect=24, ticks=list(ticks))
        bar.ax.set_yticklabels([f"{tick:.3g}" for tick in ticks], color=self.colours.ink, fontsize=8)
        bar.ax.tick_params(colors=self.colours.ink, length=0)
        bar.set_label(name, fontsize=8, color=self.colours.ink)
        bar.outline.set_visible(False)

    def finished(self) -> Figure:
        """Chooses fonts for all texts, saves the figure if there is a path, and returns it.

        Warns of characters that no installed font has.

        Text in PDF and SVG files stays text instead of outlines.
        """
        from matplotlib import rc_context
        from matplotlib.text import Text

        if self._missing:
            warnings.warn(advice(self._missing), stacklevel=3)
        texts: list[Any] = (self.figure if self.own else self.axes).findobj(Text)
        chosen, _ = families(text.get_text() for text in texts)
        for text in texts:
            text.set_fontfamily(chosen)
        if self.path is not None:
            with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing")  # in an SVG file
                # Date and version are left out, so that files are reproducible byte for byte.
                undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
                self.figure.savefig(self.path, dpi=DPI, metadata=undated.get(self._kind))
        return self.figure


@functools.cache
def colormap(colours: Palette) -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", colours.ramp)
