"""The import contract: folders are floors, imports only go down, and the gallery uses public names alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

LIBRARY, GALLERY = ROOT / "src" / "regard", ROOT / "gallery" / "regard_gallery"

# From the top down. A unit is a folder or a file directly under src/regard. Units of one floor may import
# each other, but not in a circle.
FLOORS = """
    cli __main__
    explore
    hf see crossover info
    nn convert cost
    cache packing
    _api
    _autograd
    _backends
    facts
    _call
    masks scores positions features
    _tools
    _core
"""
FLOOR = {unit: -i for i, line in enumerate(FLOORS.strip().splitlines()) for unit in line.split()}
BACKENDS = {"native", "torch", "reference"}
CORE = "_backends/native"  # the only folder that sees the compiled core


def modules(path: Path, top: Path) -> Iterator[list[str]]:
    """Yields the modules, as parts, that the imports of a file may load: `from a import b` may load a.b."""
    package = [top.name, *path.relative_to(top).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from ([*base, alias.name] for alias in node.names)


def unit_of(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


FILES = sorted(p for p in LIBRARY.rglob("*.py") if p != LIBRARY / "__init__.py")
USED = {p: [m[1:] for m in modules(p, LIBRARY) if m[0] == "regard"] for p in FILES}
EDGES = sorted({(unit_of(p), m[0]) for p in FILES for m in USED[p] if m and m[0] != unit_of(p)})


def names(paths: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in paths]


def test_every_unit_has_a_floor() -> None:
    assert {unit_of(p) for p in FILES} <= FLOOR.keys()


@pytest.mark.parametrize(("unit", "used"), EDGES)
def test_imports_go_down(unit: str, used: str) -> None:
    assert used in FLOOR, f"{unit} imports {used} from `regard` itself; import the module that defines it"
    assert FLOOR[used] <= FLOOR[unit], f"{unit} imports {used}, which is above it"


def test_no_circles() -> None:
    below = {unit: {used for u, used in EDGES if u == unit} for unit, _ in EDGES}
    while leaves := [unit for unit, used in below.items() if not used & below.keys()]:
        for unit in leaves:
            del below[unit]
    assert not below, f"these units import each other in a circle: {sorted(below)}"


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_boundaries_inside_the_library(path: Path) -> None:
    used, folder = USED[path], path.relative_to(LIBRARY).parent
    own = folder.parts[1] if folder.parts[:1] == ("_backends",) and len(folder.parts) > 1 else None
    others = {m[1] for m in used if m[:1] == ["_backends"] and len(m) > 1} & (BACKENDS - {own})
    assert own is None or not others, f"backends never import each other, here {sorted(others)}"
    assert ["_core"] not in used or folder.as_posix() == CORE, f"only {CORE} touches the compiled core"
    assert "regard_gallery" not in {m[0] for m in modules(path, LIBRARY)}, "the library knows no gallery"


GALLERY_FILES = sorted(p for p in GALLERY.rglob("*.py") if "tests" not in p.parts)


@pytest.mark.parametrize("path", GALLERY_FILES, ids=names(GALLERY_FILES))
def test_the_gallery_imports_only_public_names(path: Path) -> None:
    private = [m for m in modules(path, GALLERY) if m[0] == "regard" and any(p[0] == "_" for p in m[1:])]
    assert not private
