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


def links_of(page: Path) -> set[Path]:
    """Returns the local files to which a page links."""
    links = re.findall(r"\]\(([^)\s#]+)", FENCE.sub("", page.read_text(encoding="utf-8")))
    return {(page.parent / link).resolve() for link in links if not link.startswith("http")}


def reachable(page: Path, pages: set[Path]) -> set[Path]:
    """Returns the pages among `pages` that a reader reaches from `page` by following links."""
    found, left = set[Path](), [page]
    while left:
        page = left.pop()
        found.add(page)
        left += (links_of(page) & pages) - found
    return found


def test_every_page_is_reachable_from_the_index() -> None:
    pages = {*(ROOT / "docs").rglob("*.md")}
    assert pages - reachable(ROOT / "docs" / "README.md", pages) == set()


def test_a_page_without_a_link_is_not_reachable(tmp_path: Path) -> None:
    texts = {"a": "[b](b.md#part)", "b": "[c](sub/c.md)", "sub/c": "[a](../a.md)", "d": "[a](a.md)"}
    (tmp_path / "sub").mkdir()
    for name, text in texts.items():
        (tmp_path / f"{name}.md").write_text(text)
    pages = {*tmp_path.rglob("*.md")}
    assert pages - reachable(tmp_path / "a.md", pages) == {tmp_path / "d.md"}


def test_the_index_by_task_is_at_the_top() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    table = text.partition("| I want to ... | page |")[2].partition("\n\n")[0]
    assert text.index("| I want to ...") < 100
    assert 15 <= len(re.findall(r"^\| .+ \| .*\]\(.+\) \|$", table, re.M)) == table.count("\n") - 1 <= 20


def test_the_loop_of_generation_has_25_lines() -> None:
    page = ROOT / "docs" / "generate.md"
    (_, loop), *_ = blocks(page.read_text(encoding="utf-8"))
    assert "def generate(" in loop
    assert len([line for line in loop.splitlines() if line.strip()]) <= 25


@pytest.mark.parametrize("index", ["README.md", "docs/README.md"])
def test_the_index_links_every_page(index: str) -> None:
    page = ROOT / index
    links = re.findall(r"\]\(([^)\s#]+)\)", page.read_text(encoding="utf-8"))
    linked = {(page.parent / link).resolve() for link in links if not link.startswith("http")}
    assert {*(ROOT / "docs").glob("*.md"), ROOT / "docs" / "claims" / "README.md"} - {page} <= linked
