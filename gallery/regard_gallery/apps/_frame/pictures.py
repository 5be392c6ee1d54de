"""The common style of the applications' pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, BLUE, ORANGE, GREY = "#33312c", "#0072b2", "#e69f00", "#9a958a"
COLOURS = (BLUE, ORANGE, "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", GREY, "#7b5ea7", "#332288")


def figure(width: float = 7.6, height: float = 4.6, **options: Any) -> tuple[Figure, Any]:
    """Returns a figure of this size in inches, and its axes. `options` go to `subplots`."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    return drawn, drawn.subplots(**options)


def save(drawn: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=110, metadata={"Software": None})
