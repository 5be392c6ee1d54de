"""Writes the tables of docs/zh/claims.md. `python tools/docs/claims_zh.py`

Verdicts and numbers come from the findings that `regard claims --page` recorded. claims_zh.toml has
the words: a pair of an English and a Chinese text for each field of a finding.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from regard_gallery.claims import records

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "zh" / "claims.md"
TEXTS = Path(__file__).with_suffix(".toml")
BEGIN = "<!-- Written by `python tools/docs/claims_zh.py`: -->\n"
COLUMNS = {"实验": 0, "说法": 4, "结论": 3, "实测": 12, "正确的说法": 8}  # title: spaces at each side
FIELDS = ("claim", "measured", "correct")


def texts() -> dict[str, Any]:
    """Returns the tables `verdicts`, `words`, `groups` and `claims` of claims_zh.toml."""
    return tomllib.loads(TEXTS.read_text(encoding="utf-8"))


def translated(place: str, text: str, english: str, chinese: str, words: dict[str, str]) -> str:
    """Puts what `text` has at the names of the pattern `english` into `chinese`.

    Raises if the text does not fit the pattern, because then the Chinese text may be stale, and if
    a name stands for words that are not in `words`.
    """
    pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+?)", re.escape(english))
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(f"{TEXTS.name}: {place}: expected a pattern that fits {text!r}, got {english!r}")
    values = {name: words.get(value, value) for name, value in match.groupdict().items()}
    if unknown := re.findall(r"\b[a-z]{4,}\b", " ".join(values.values())):
        raise ValueError(f"{TEXTS.name}: {place}: expected numbers for the names, got {unknown} in {text!r}")
    return chinese.format(**values)


def translate(found: dict[str, records.Record]) -> dict[str, records.Record]:
    """Returns the records in Chinese."""
    words = texts()
    verdicts, claims = words["verdicts"], words["claims"]
    known = verdicts | words["words"]
    if missing := {name: dict(record) for name, record in found.items() if name not in claims}:
        raise ValueError(f"{TEXTS.name}: expected a text for every claim, got none for {missing}")
    return {
        name: {"verdict": verdicts[record["verdict"]]}
        | {
            field: translated(f"claims.{name}.{field}", record[field], *claims[name][field], known)
            for field in FIELDS
        }
        for name, record in found.items()
    }


def unbroken(title: str, spaces: int) -> str:
    """Returns a title that keeps its column wide: Chinese text may break after every character."""
    return spaces * "&nbsp;" + "&NoBreak;".join(title) + spaces * "&nbsp;"


def tables(found: dict[str, records.Record]) -> str:
    """Formats findings in Chinese: a line that counts the verdicts, then a table for each group."""
    words = texts()
    counts = "，".join(f"{words['verdicts'][word]} {n} 条" for word, n in records.counts(found).items())
    columns = [unbroken(title, spaces) for title, spaces in COLUMNS.items()]
    groups = records.tables(translate(found), words["groups"], columns)
    return f"共 {len(found)} 条说法：{counts}。\n{groups}"


if __name__ == "__main__":
    records.fill(PAGE, BEGIN, tables(records.read()))
