"""Checks that Python blocks of the README and docs/ run and that local links resolve.

The blocks of a page run in order and share one namespace.
"""

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
    """Returns (first line number, code) of each block fenced with exactly ```python."""
    return [(text.count("\n", 0, m.start(2)) + 1, textwrap.dedent(m.group(2))) for m in FENCE.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks(page.read_text(encoding="utf-8")):
        # Leading empty lines make tracebacks show line numbers of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


def test_blocks() -> None:
    text = "a\n```python\nx = 1\n```\n- b\n  ```python\n  y = 2\n  ```\n```text\nno\n```\n"
    assert blocks(text) == [(3, "x = 1\n"), (7, "y = 2\n")]


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("index", ["README.md", "docs/README.md"])
def test_the_index_links_every_page(index: str) -> None:
    page = ROOT / index
    links = re.findall(r"\]\(([^)\s#]+)\)", page.read_text(encoding="utf-8"))
    linked = {(page.parent / link).resolve() for link in links if not link.startswith("http")}
    assert {*(ROOT / "docs").glob("*.md"), ROOT / "docs" / "claims" / "README.md"} - {page} <= linked
