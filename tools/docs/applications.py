"""Writes results of full runs into the gallery: `python tools/docs/applications.py build/apps`.

Applications without a run in the folder keep their texts and pictures.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from regard_gallery.apps import NAMES
from regard_gallery.apps._frame.report import threads
from regard_gallery.apps._frame.run import OWN

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "gallery.md"
SEEDS = 3  # minimum number of seeds in a full run


def cell(scores: list[dict[str, float]], measure: str) -> str:
    """Returns mean and range over the seeds, such as "0.81 (0.80 to 0.83)"."""
    values = [one[measure] for one in scores]
    return f"{mean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def rows(run: dict[str, Any]) -> str:
    """Returns a table of scores, with the baselines first and Regard last."""
    measures = run["measures"]
    lines = [["", *measures], ["---", *["---:"] * len(measures)]]
    for name, scores in run["scores"].items():
        lines.append([name, *(cell(scores, measure) for measure in measures)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(name: str, run: dict[str, Any]) -> str:
    """Returns the generated text of an application in the gallery."""
    whole, trained, count = min(zip(run["whole"], run["seconds"], run["threads"], strict=True))
    seeds = len(run["whole"])
    share = "each" if run["alone"] == seeds else run["alone"]
    return (
        f"{rows(run)}\n\n"
        f"With {share} of the {seeds} seeds, the model reaches the goals.\n"
        f"The fastest run took {whole:.0f} s with {threads(count)}, including {trained:.0f} s of training.\n"
        f"A training step takes {1000 * run['step']:.0f} ms with Regard's attention and "
        f"{threads(run['step threads'])},\n"
        f"and {run['ratio']:.2f} times as long with PyTorch's attention.\n\n"
        f"![{name}](images/app-{name}.png)"
    )


def overview(name: str, run: dict[str, Any]) -> str:
    """Returns a row of the overview: the first measure, for the best baseline and for Regard."""
    measure = run["measures"][0]
    means = {key: mean(one[measure] for one in scores) for key, scores in run["scores"].items()}
    model = means.pop(OWN)
    baselines = [key for key in means if key not in run["peers"]]
    pick = max if measure in run["more is better"] else min
    best = pick(baselines, key=lambda key: means[key])
    cells = [measure, best, f"{means[best]:.4g}", f"{model:.4g}", f"{run['ratio']:.2f}x"]
    return f"| [{name}](#{anchor(name)}) | {' | '.join(cells)} |"


def anchor(name: str) -> str:
    """Returns the anchor of the heading "Name: ..." in docs/gallery.md."""
    (title,) = re.findall(rf"^## ({name.capitalize()}: .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    return title.lower().replace(":", "").replace(" ", "-")


def put(page: Path, pattern: str, content: str) -> None:
    """Replaces the text between the two groups of the regex `pattern`, which must match once."""
    text = page.read_text(encoding="utf-8")
    text, count = re.subn(pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.M | re.S)
    if count != 1:
        raise SystemExit(f"{page.name}: expected one match of {pattern!r}, got {count}")
    page.write_text(text, encoding="utf-8")


def full_run(path: Path) -> dict[str, Any]:
    """Reads the results of a full run. Exits if it missed a goal or was slower than PyTorch."""
    run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not run["reached"] or len(run["whole"]) < SEEDS:
        raise SystemExit(f"{path.stem}: expected a full run over {SEEDS} seeds that reached its goals")
    if run["ratio"] < 1:
        raise SystemExit(f"{path.stem}: expected no step slower than PyTorch's, got {run['ratio']:.2f}")
    return run


def main(out: Path) -> None:
    runs = {name: full_run(path) for name in NAMES if (path := out / f"{name}.json").exists()}
    for name, run in runs.items():
        put(PAGE, rf"(<!-- {name} -->\n).*?(<!-- end -->)", section(name, run))
        put(PAGE, rf"()^\| \[{name}\][^\n]*\n()", overview(name, run))
        shutil.copy(out / f"{name}.png", DOCS / "images" / f"app-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
