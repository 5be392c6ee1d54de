"""Writes docs/notes.md, the index of the study notes, from notes.toml. `python tools/docs/notes.py`

The verdicts of claims are those that `regard claims` recorded.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from regard_gallery.claims import records

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "notes.md"
CLAIMS = "../gallery/regard_gallery/claims"
SECTIONS = {"A": "Formulas and code samples", "B": "Claims", "D": "Questions and languages"}
HEAD = """\
# The study notes, row by row

Regard grew from five study notes on attention. This page lists what the notes contain, with the
line of Regard that answers it and the command or test that shows the answer. Verdicts of claims are
those of [`regard claims`](claims/README.md). The rows C, tasks on data, are not listed here; the
[gallery](gallery.md) has twelve applications. `python tools/docs/notes.py` writes this page from
`tools/docs/notes.toml`.
"""


def rows() -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each section of notes.toml."""
    return tomllib.loads(Path(__file__).with_name("notes.toml").read_text(encoding="utf-8"))


def claims_of(row: dict[str, Any]) -> list[str]:
    """Returns the names of a row's experiments."""
    claim = row.get("claim", [])
    return [claim] if isinstance(claim, str) else claim


def commands_of(row: dict[str, Any]) -> list[str]:
    """Returns the commands of a row."""
    run = [row["run"]] if "run" in row else []
    return [*(f"regard claims {name}" for name in claims_of(row)), *run]


def answer_of(row: dict[str, Any]) -> str:
    """Returns Regard's answer to a row, if there is one, and the verdicts on what the notes say."""
    found = dict.fromkeys(records.read()[name]["verdict"] for name in claims_of(row))
    verdicts = ", ".join(f"**{verdict}**" for verdict in found)
    if "answer" not in row:
        return verdicts
    return f"{row['answer']}; the notes are {verdicts}" if verdicts else row["answer"]


def shown_by(section: str, row: dict[str, Any]) -> str:
    """Returns links to the sample, the experiments, the command and the test of a row."""
    claims = [f"[`regard claims {name}`]({CLAIMS}/{name}.py)" for name in claims_of(row)]
    runs = [f"`{row['run']}`"] if "run" in row else []
    path = row.get("test", "").split("::")[0]
    tests = [f"[`{row['test']}`](../{path})"] if path else []
    sample = ["[sample](from-notes.md)"] if section == "A" else []
    return "<br>".join((*sample, *claims, *runs, *tests))


def page() -> str:
    """Returns the text of the page."""
    lines = [HEAD]
    for section, title in SECTIONS.items():
        lines += [
            f"## {section}. {title}\n",
            "| row | in the notes | in Regard | shown by |",
            "|---|---|---|---|",
        ]
        for row in rows()[section]:
            cells = (f"{section}{row['number']}", row["item"], answer_of(row), shown_by(section, row))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
