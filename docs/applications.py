"""Writes numbers and pictures of full runs into docs/gallery.md: `python docs/applications.py build/apps`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from regard.apps import NAMES

HERE = Path(__file__).parent
PAGE = HERE / "gallery.md"


def cell(scores: list[dict[str, float]], measure: str, seeds: int) -> str:
    """0.81, and over several seeds also the least and the most."""
    mean, least, most = (f"{one[measure]:.4g}" for one in scores)
    return mean if seeds == 1 else f"{mean} ({least} to {most})"


def rows(run: dict[str, Any]) -> str:
    """A table: baselines first, then Regard."""
    measures, seeds = run["measures"], run["seeds"]
    lines = [["", *measures], ["---", *["---:"] * len(measures)]]
    for name, scores in run["scores"].items():
        lines.append([name, *(cell(scores, measure, seeds) for measure in measures)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(name: str, run: dict[str, Any]) -> str:
    seeds = "" if run["seeds"] == 1 else f" for {run['seeds']} seeds"
    threads = f"{run['threads']} thread{'s' * (run['threads'] > 1)}"
    return (
        f"{rows(run)}\n\n"
        f"Trained in {run['seconds']:.0f} s{seeds} with {threads}. "
        f"A training step with PyTorch's attention takes {run['ratio']:.2f} times as long.\n\n"
        f"![{name}](images/app-{name}.png)"
    )


def main(out: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in NAMES:
        if not (out / f"{name}.json").exists():
            continue
        run = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        if run["quick"] or run["attention"] != "regard" or not run["reached"]:
            raise SystemExit(f"{name}: expected a full run by Regard that reached its goals")
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        text, count = mark.subn(
            lambda found, run=run, name=name: f"{found[1]}{section(name, run)}\n{found[2]}", text
        )
        if count != 1:
            raise SystemExit(f"{PAGE.name}: expected one place for {name}, got {count}")
        shutil.copy(out / f"{name}.png", HERE / "images" / f"app-{name}.png")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
