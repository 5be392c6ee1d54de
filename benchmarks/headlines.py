"""Draws the chart of the README from the table in RESULTS.md: `python benchmarks/headlines.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases import CASES

HERE = Path(__file__).parent
SHOWN = {
    "dense-2048-64": "dense",
    "causal-2048-64": "causal",
    "window-4096": "sliding window of 256",
    "documents-4096": "packed documents",
    "dropout-1024": "dropout",
    "train-causal-1024": "training, causal",
    "train-bf16-1024": "training, bfloat16",
    "decode-bf16-1-8-4096": "decode step, bfloat16",
}
# File name: (text, Regard's bars, faint lines). Backgrounds are transparent.
THEMES = {
    "headlines.png": ("#33312c", "#0072b2", "#c9c5bd"),
    "headlines-dark.png": ("#e6edf3", "#4aa3e0", "#4b535d"),
}


def ratios(page: str) -> dict[str, float]:
    """Reads the text of RESULTS.md and returns a dict from labels to speedups, ascending.

    A speedup is the time of the fastest PyTorch path divided by Regard's time.
    """
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"]
    shapes = {(case.title, case.shape): SHOWN[case.name] for case in CASES if case.name in SHOWN}
    values: dict[str, float] = {}
    for row in rows:
        label = shapes.get((row[0], row[1]))
        if label and row[5]:  # empty if the result was refused
            values[label] = min(float(row[5]), values.get(label, float("inf")))
    return dict(sorted(values.items(), key=lambda item: item[1]))


def draw(values: dict[str, float], path: Path) -> None:
    """Draws one bar for each speedup, and a line at 1."""
    from matplotlib.figure import Figure

    ink, bar, faint = THEMES[path.name]
    figure = Figure(figsize=(4.8, 3.7), layout="constrained")
    axes: Any = figure.subplots()
    axes.barh(range(len(values)), values.values(), color=bar, height=0.62)
    axes.axvline(1, color=ink, linewidth=1, linestyle=(0, (2, 2)))
    for y, ratio in enumerate(values.values()):
        axes.text(max(ratio, 1) + 0.4, y, f"{ratio:.1f}x", va="center", fontsize=9, color=ink, weight="bold")
    axes.text(1.3, -0.75, "PyTorch = 1", fontsize=8.5, color=ink, va="center")
    axes.set_yticks(range(len(values)), list(values), fontsize=9)
    axes.set_xlim(0, max(values.values()) * 1.13)
    axes.set_ylim(len(values) - 0.5, -1.1)
    axes.set_xticks([])
    figure.suptitle(
        "Regard's speed relative to PyTorch's fastest path", fontsize=10, color=ink, x=0.01, ha="left"
    )
    axes.tick_params(colors=ink, length=0)
    axes.spines[:].set_visible(False)
    axes.spines["left"].set(visible=True, color=faint)
    figure.savefig(path, dpi=200, transparent=True, metadata={"Software": None})


def main(page: Path = HERE / "RESULTS.md") -> None:
    values = ratios(page.read_text(encoding="utf-8"))
    for name in THEMES:
        draw(values, page.with_name(name))


if __name__ == "__main__":
    main()
