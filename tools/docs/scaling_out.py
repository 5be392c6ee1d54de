"""Runs the commands of docs/scaling-out.md, writes their output into the page, and draws its picture.

`python tools/docs/scaling_out.py` rewrites the page. `pictures.py` draws the picture.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from regard import cost, masks as M
from regard.cli._app import app

PAGE = Path(__file__).parents[2] / "docs" / "scaling-out.md"
BLOCK = re.compile(r"(```sh\nregard (cost .*?)```\n\n```text\n)(.*?)(```\n)", re.S)
UNSIGNED: dict[str, Any] = {"Software": None}  # files do not depend on matplotlib's version
RANKS = [2**n for n in range(3, 13)]
TOKENS = 1_000_000
MASKS: dict[str, M.Mask] = {"causal": M.Causal(), "window of 4,096": M.sliding(4096)}
# Colours like those of Okabe and Ito, and widths, so that lines over others show all of them.
LINES = {
    "ulysses": ("#009e73", 5.0),
    "ring": ("#3d94d6", 3.2),
    "gather": ("#e69f00", 1.6),
    "usp": ("#cc79a7", 1.6),
}
# File name: (text, faint lines).
THEMES = {"scaling-out.png": ("#33312c", "#c9c5bd"), "scaling-out-dark.png": ("#e6edf3", "#4b535d")}


def written(page: str) -> str:
    """Returns the page with the output of its commands."""
    return BLOCK.sub(lambda found: found[1] + output(found[2]) + found[4], page)


def output(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command.replace("\\\n", " ")))
    if result.exit_code:
        raise RuntimeError(f"{command}: {result.output}")
    return result.output


def main(images: Path) -> None:
    costs = {name: measured(mask) for name, mask in MASKS.items()}
    for name, theme in THEMES.items():
        draw(costs, *theme).savefig(images / name, dpi=120, transparent=True, metadata=UNSIGNED)


def measured(mask: M.Mask) -> list[cost.RanksCost]:
    call = cost.CallSpec(Hq=32, Hkv=8, Lq=TOKENS, D=128, dtype=torch.bfloat16, mask=mask)
    return [each for ranks in RANKS for each in cost.over_ranks(call, ranks)]


def draw(costs: dict[str, list[cost.RanksCost]], ink: str, faint: str) -> Figure:
    """Draws the seconds of each method by the number of ranks, one panel for each mask."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (title, of_mask) in zip(figure.subplots(1, len(costs)), costs.items(), strict=True):
        for method, (colour, width) in LINES.items():
            points = [(x.ranks, x.seconds) for x in of_mask if x.method == method]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=width, marker=".", label=method)
        ideal = {x.ranks: x.compute for x in of_mask if x.method == "ring"}
        axes.plot(ideal.keys(), ideal.values(), color=ink, linestyle=":", label="computing alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"1,000,000 tokens, {title}", fontsize=10, color=ink)
        axes.set_xlabel("ranks", fontsize=9, color=ink)
        axes.set_xticks(RANKS[::3], [f"{n:,}" for n in RANKS[::3]])
        axes.tick_params(colors=ink, labelsize=8, which="both")
        axes.grid(color=faint, linewidth=0.5, alpha=0.6)
        axes.spines[:].set_color(faint)
        axes.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.set_ylabel("seconds", fontsize=9, color=ink)
    first.legend(fontsize=8, frameon=False, labelcolor=ink)
    return figure


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
