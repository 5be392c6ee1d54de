"""Numbers and pictures of full runs for gallery and README: `python docs/applications.py build/apps`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from regard.apps import NAMES
from regard.apps._report import OWN, threads

HERE = Path(__file__).parent
PAGE, README = HERE / "gallery.md", HERE.parent / "README.md"


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
    each, seeds = run["seconds"] / run["seeds"], f"{run['seeds']} seed{'s' * (run['seeds'] > 1)}"
    return (
        f"{rows(run)}\n\n"
        f"{seeds}, each trained in {each:.0f} s with {threads(run['threads'])}. "
        f"A training step takes {1000 * run['step']:.0f} ms with {threads(run['step threads'])}, "
        f"and {run['ratio']:.2f} times as long with PyTorch's attention.\n\n"
        f"![{name}](images/app-{name}.png)"
    )


def overview(runs: dict[str, dict[str, Any]]) -> str:
    """One line for each application: its first measure beside the best of the baselines."""
    lines = [
        ["", "measure", "best baseline", "", "Regard", "a step by PyTorch"],
        ["---", "---", "---", *["---:"] * 3],
    ]
    for name, run in runs.items():
        measure = run["measures"][0]
        means = {who: scores[0][measure] for who, scores in run["scores"].items()}
        own = means.pop(OWN)
        pick = max if measure in run["more is better"] else min
        rival = pick(means, key=lambda who: means[who])
        link = f"[{name}](docs/gallery.md#{anchor(name)})"
        lines.append([link, measure, rival, f"{means[rival]:.4g}", f"{own:.4g}", f"{run['ratio']:.2f}x"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def anchor(name: str) -> str:
    """Of the heading "Name: ..." in the gallery."""
    (title,) = re.findall(rf"^## ({name.capitalize()}: .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    return title.lower().replace(":", "").replace(" ", "-")


def put(page: Path, name: str, content: str) -> None:
    """Between the marks of that name."""
    mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
    text = page.read_text(encoding="utf-8")
    text, count = mark.subn(lambda found: f"{found[1]}{content}\n{found[2]}", text)
    if count != 1:
        raise SystemExit(f"{page.name}: expected one place for {name}, got {count}")
    page.write_text(text, encoding="utf-8")


def full_run(path: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if run["quick"] or run["attention"] != "regard" or not run["reached"]:
        raise SystemExit(f"{path.stem}: expected a full run by Regard that reached its goals")
    return run


def main(out: Path) -> None:
    runs = {name: full_run(out / f"{name}.json") for name in NAMES}
    for name, run in runs.items():
        put(PAGE, name, section(name, run))
        shutil.copy(out / f"{name}.png", HERE / "images" / f"app-{name}.png")
    put(README, "applications", overview(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
