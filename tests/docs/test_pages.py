"""Every Python block of the README and of docs/ runs. The blocks of a file share one namespace, in order."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from support import ROOT

PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if p.exists()]
FENCE = re.compile(r"^([ \t]*)```python[ \t]*\n(.*?)^\1```[ \t]*$", re.M | re.S)


def blocks(text: str) -> list[tuple[int, str]]:
    """(number of the first line, code) of each block fenced with exactly ```python."""
    return [(text.count("\n", 0, m.start(2)) + 1, textwrap.dedent(m.group(2))) for m in FENCE.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks(page.read_text(encoding="utf-8")):
        # Empty lines in front give errors the line numbers of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\n- b\n  ```python\n  y = 2\n  ```\n```text\nno\n```\n"
    assert blocks(text) == [(3, "x = 1\n"), (7, "y = 2\n")]
