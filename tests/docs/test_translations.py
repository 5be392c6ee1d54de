"""Compares the Chinese pages with the English pages: blocks, pictures, links, structure, numbers.

Chinese pages are docs/zh/NAME.md for docs/NAME.md or docs/NAME/README.md, and README.zh.md, which is
a short form of README.md. Only docs/zh/README.md, the list of the Chinese pages, has no English page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import ROOT
from support.texts import NUMBER

ZH, WIDTH = ROOT / "docs" / "zh", 100
INDEX = ZH / "README.md"
SHORT = ROOT / "README.zh.md"
PAGES = [*sorted(ROOT.glob("*.zh.md")), *sorted(p for p in ZH.rglob("*.md") if p != INDEX)]
FENCE = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.M | re.S)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|\bsrc(?:set)?=\"([^\"]+)\"")
LINK = re.compile(r"(?<!!)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
HAN = "[\u4e00-\u9fff]"
LATIN = r"[A-Za-z0-9`]"
FULL_WIDTH = "，。；：？！、（）"

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
each_whole_page = pytest.mark.parametrize(
    "page", [p for p in PAGES if p != SHORT], ids=[str(p.relative_to(ROOT)) for p in PAGES if p != SHORT]
)
each_text = pytest.mark.parametrize(
    "page", [*PAGES, INDEX], ids=[str(p.relative_to(ROOT)) for p in [*PAGES, INDEX]]
)


def english(page: Path) -> Path:
    """Returns the English page of a Chinese page."""
    if page.parent == ROOT:
        return page.with_name(page.name.replace(".zh.md", ".md"))
    plain = ROOT / "docs" / page.relative_to(ZH)
    return plain if plain.exists() else plain.with_suffix("") / "README.md"


CHINESE = {english(page): page for page in PAGES}


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """Returns the text of a page without its code blocks."""
    return FENCE.sub("", read(page))


def pictures(page: Path) -> set[Path]:
    return {(page.parent / (a or b)).resolve() for a, b in PICTURE.findall(prose(page))}


def links(page: Path) -> set[str | Path]:
    """Returns the addresses of web pages and the paths of files to which a page links."""
    found = {link.partition("#")[0] for link in LINK.findall(prose(page))} - {""}
    return {link if link.startswith("http") else (page.parent / link).resolve() for link in found}


def test_there_are_pages() -> None:
    assert {ROOT / "README.zh.md", ZH / "why.md", ZH / "claims.md", ZH / "from-notes.md"} <= {*PAGES}


@each_page
def test_a_page_has_an_english_page(page: Path) -> None:
    assert english(page).exists()
    assert english(page) != page
    assert english(page) in links(page)


@each_page
def test_blocks_are_equal(page: Path) -> None:
    blocks = FENCE.findall(read(page))
    assert blocks
    assert blocks == FENCE.findall(read(english(page)))


@each_whole_page
def test_pictures_are_the_same(page: Path) -> None:
    assert pictures(page) == pictures(english(page))
    assert all(picture.is_file() for picture in pictures(page))


def test_the_readme_is_a_short_form() -> None:
    """README.zh.md fits on one screen and says nothing that README.md does not say."""
    assert len(read(SHORT).splitlines()) <= 60
    assert pictures(SHORT) <= pictures(english(SHORT))
    assert {*NUMBER.findall(prose(SHORT))} <= {*NUMBER.findall(prose(english(SHORT)))}


@each_text
def test_links_resolve(page: Path) -> None:
    assert all(link.exists() for link in links(page) if isinstance(link, Path))


@each_whole_page
def test_links_are_those_of_the_english_page(page: Path) -> None:
    """A link to a page that has a Chinese page goes to the Chinese page."""
    expected = {CHINESE.get(link, link) if isinstance(link, Path) else link for link in links(english(page))}
    assert expected - {page} <= links(page)


def structure(page: Path) -> tuple[list[str], int, int, int]:
    """Returns the levels of the headings, and the numbers of table rows, HTML rows and list items."""
    text = prose(page)
    patterns = (r"^\|", r"^<tr>", r"^- ")
    rows, html, items = (len(re.findall(pattern, text, re.M)) for pattern in patterns)
    return re.findall(r"^#+(?= )", text, re.M), rows, html, items


@each_whole_page
def test_headings_rows_and_lists_are_as_many(page: Path) -> None:
    assert structure(page) == structure(english(page))


@each_whole_page
def test_every_number_is_there(page: Path) -> None:
    assert {*NUMBER.findall(prose(english(page)))} <= {*NUMBER.findall(prose(page))}


def test_the_lists_link_every_page() -> None:
    pages = {page for page in PAGES if page.parent != ROOT}
    assert pages <= links(INDEX)
    assert pages <= links(ROOT / "README.zh.md")
    assert {*PAGES, INDEX} <= links(ROOT / "docs" / "README.md")
    assert ROOT / "README.zh.md" in links(ROOT / "README.md")


@each_text
def test_chinese_typography(page: Path) -> None:
    """A soft line break becomes a space, so lines end with punctuation or beside Latin text."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]+\)", r"\1", prose(page))  # links as their texts
    text = re.sub(r"<!--.*?-->|</?\w[^>]*>| *\| *", "|", text)
    assert not re.findall(f".*(?:{HAN}{LATIN}|{LATIN}{HAN}).*", text), "a space between Chinese and Latin"
    assert not re.findall(f".*{HAN}[,;:?!].*", text), "full-width punctuation"
    assert not re.findall(rf"\([^()\n]*{HAN}[^()\n]*\)", text), "full-width brackets"
    assert not re.findall(f".*(?: [{FULL_WIDTH}]|[{FULL_WIDTH}] ).*", text), "a space at punctuation"
    assert not re.findall(f"^.*{HAN}\n[ ]*{HAN}.*$", text, re.M), "a line break between characters"
    lines = [line for line in prose(page).splitlines() if not line.startswith(("|", "!", "<", "  ["))]
    assert not [line for line in lines if len(line) > WIDTH]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("注意力Attention", "a space between"),
        ("注意力,机制", "full-width punctuation"),
        ("MHA (多头)", "full-width brackets"),
        ("注意力， Regard", "a space at"),
        ("注意\n力", "a line break"),
    ],
)
def test_faults_are_found(text: str, fault: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=fault):
        test_chinese_typography(page)


def test_structure_blocks_links_and_pictures_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n[`a`](a.md#b) ![c](c.png)\n\n```sh\n# [d](d.md)\n```\n\n- 1\n", encoding="utf-8")
    assert structure(page) == (["#"], 0, 0, 1)
    assert FENCE.findall(read(page)) == ["```sh\n# [d](d.md)\n```"]
    assert links(page) == {tmp_path / "a.md"}
    assert pictures(page) == {tmp_path / "c.png"}
