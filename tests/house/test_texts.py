"""DESIGN.md, folder READMEs and docs/decisions: named paths exist, lines are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from regard import masks
from support import ROOT

DESIGN, DESIGN_BYTES, WIDTH = ROOT / "DESIGN.md", 14_000, 100
FOLDERS = ("native", "src/regard", "gallery/regard_gallery", "tools")
READMES = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("README.md"))]
TEXTS = [DESIGN, *READMES, *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
PAGES = sorted({*TEXTS, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
SOURCES = ("native", "src", "gallery", "tools", "tests", "docs", "benchmarks", "examples")
TREE = [p for folder in SOURCES for p in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
ENDINGS = {f"/{p.relative_to(ROOT).as_posix()}" for p in TREE}

LINK = re.compile(r"\]\(([^)#:]+)\)")
PATH = re.compile(r"`((?:[\w.-]+/)*(?:[\w.-]+\.(?:py|pyi|cpp|h|md|toml|txt)|[\w.-]+/))`")

each_text = pytest.mark.parametrize("path", TEXTS, ids=[str(p.relative_to(ROOT)) for p in TEXTS])


@each_text
def test_link_targets_exist(path: Path) -> None:
    targets = LINK.findall(path.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (path.parent / target).exists()]


@each_text
def test_named_files_exist(path: Path) -> None:
    """Texts may omit leading folders of a path. NAME stands for any name."""
    paths = PATH.findall(path.read_text(encoding="utf-8"))
    names = {re.sub(r"^(\.\./)+", "", name).removesuffix("/") for name in paths}
    missing = [n for n in names if "NAME" not in n and not any(e.endswith(f"/{n}") for e in ENDINGS)]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_prose_is_wrapped(path: Path) -> None:
    """Tables, pictures, code and the addresses of links may be longer."""
    text = re.sub(r"^[ ]*```.*?^[ ]*```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = re.sub(r"\]\([^)]*\)", "]", text).splitlines()
    assert not [x for x in lines if len(x) > WIDTH and not x.startswith(("|", "!["))]


def test_design_is_short() -> None:
    assert len(DESIGN.read_bytes()) <= DESIGN_BYTES


def test_table_of_ops_matches_the_code() -> None:
    text = (ROOT / "native" / "mask" / "README.md").read_text(encoding="utf-8")
    table = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| ([A-Z]+) \|", text, flags=re.M)}
    assert table == {op.name: op.value for op in masks.Op}


PYTHON = re.compile(
    r"(?:Python |requires-python = \">=|target-version = \"py)(3\.?\d+)(?: or newer| REQUIRED|\")"
)


def test_statements_of_the_python_version_agree() -> None:
    names = (
        "pyproject.toml",
        "gallery/pyproject.toml",
        "CMakeLists.txt",
        "README.md",
        "CONTRIBUTING.md",
        "Makefile",
    )
    found = {name: PYTHON.findall((ROOT / name).read_text(encoding="utf-8")) for name in names}
    assert all(found.values()), found
    assert {version.replace(".", "") for versions in found.values() for version in versions} == {"311"}, found
