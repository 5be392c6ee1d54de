"""The findings last recorded, which `regard claims` lists and from which it writes the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import CLAIMS, GROUPS, NAMES
from .finding import VERDICTS, Finding

FILE = Path(__file__).parent / "recorded.json"
BEGIN, END = "<!-- Written by `regard claims --page`: -->\n", "<!-- end -->\n"
COLUMNS = ("experiment", "claim", "verdict", "measured", "correct")
SOURCES = "../../gallery/regard_gallery/claims"  # seen from docs/claims/README.md and docs/zh/claims.md

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


def counts(records: Mapping[str, Record]) -> dict[str, int]:
    """Returns the number of records with each verdict."""
    return {word: sum(record["verdict"] == word for record in records.values()) for word in VERDICTS}


def tables(
    records: Mapping[str, Record], titles: Mapping[str, str] = GROUPS, columns: Sequence[str] = COLUMNS
) -> str:
    """Formats all records: a table under a title for each group."""
    text, head = "", f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    for group, title in titles.items():
        rows = [row(name, records[name]) for name, kind in CLAIMS if kind == group and name in records]
        text += f"\n## {title}\n\n{head}{''.join(rows)}"
    return text


def fill(page: Path, begin: str, text: str) -> None:
    """Replaces the text between the lines `begin` and END of a page."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"--page: expected a page with the lines {begin!r} and {END!r}, got {page}")
    page.write_text(f"{before}{begin}\n{text}\n{END}{after}", encoding="utf-8")


def write_page(page: Path) -> None:
    """Writes the number of claims with each verdict and the tables of all records to the page."""
    records = read()
    verdicts = ", ".join(f"{n} {word}" for word, n in counts(records).items())
    fill(page, BEGIN, f"{len(records)} claims: {verdicts}.\n{tables(records)}")
