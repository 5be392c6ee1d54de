"""The findings last recorded, which `regard claims` lists and from which it writes the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from . import CLAIMS, GROUPS, NAMES
from .finding import VERDICTS, Finding

FILE = Path(__file__).parent / "recorded.json"
BEGIN, END = "<!-- Written by `regard claims --page`: -->\n", "<!-- end -->\n"
SOURCES = "../../gallery/regard_gallery/claims"  # seen from docs/claims/README.md

Record = Mapping[str, str]  # the fields claim, verdict, measured, correct of a Finding


def read() -> dict[str, Record]:
    """Returns the recorded findings by name, in the order of CLAIMS."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: stored[name] for name in NAMES if name in stored}


def write(findings: Mapping[str, Finding]) -> None:
    """Replaces the records of these findings. Other records stay unchanged."""
    fields = ("claim", "verdict", "measured", "correct")
    new = {name: {field: getattr(found, field) for field in fields} for name, found in findings.items()}
    records = {**read(), **new}
    ordered = {name: records[name] for name in NAMES if name in records}
    FILE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def row(name: str, record: Record) -> str:
    """Formats a record as a row of the page's tables."""
    cells = f"[`{name}`]({SOURCES}/{name}.py)", record["claim"], f"**{record['verdict']}**"
    return f"| {' | '.join((*cells, record['measured'], record['correct']))} |\n"


def tables(records: Mapping[str, Record]) -> str:
    """Formats all records: a line that counts the verdicts, then a table for each group."""
    counts = {word: sum(record["verdict"] == word for record in records.values()) for word in VERDICTS}
    text = f"{len(records)} claims: {', '.join(f'{n} {word}' for word, n in counts.items())}.\n"
    for group, title in GROUPS.items():
        rows = [row(name, records[name]) for name, kind in CLAIMS if kind == group and name in records]
        head = "| experiment | claim | verdict | measured | correct |\n|---|---|---|---|---|\n"
        text += f"\n## {title}\n\n{head}{''.join(rows)}"
    return text


def write_page(page: Path) -> None:
    """Replaces the text between BEGIN and END on the page by the tables of all records."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"--page: expected a page with the lines {BEGIN!r} and {END!r}, got {page}")
    page.write_text(f"{before}{BEGIN}\n{tables(read())}\n{END}{after}", encoding="utf-8")
