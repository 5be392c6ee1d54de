"""Imports only go down. A unit is a file or a package directly under src/regard."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "regard"

FLOORS = """
    7    cli __main__
    6.5  apps explore
    6    hf models see distributed info crossover compare
    5    nn convert cost
    4.5  cache packing _meter
    4    _attention _decode _merge _packed _plan _evidence _linear
    3    _autograd _linear_autograd _ops _vmap
    2    _dispatch
    1    _native _torch _linear_torch _evidence_native _evidence_torch reference _boxes _higher
    0    _arguments _problem _linear_problem _dense _stored masks scores positions features facts _measuring
    0    _listeners _terminal
    -1   _core
"""
FLOOR = {name: float(line.split()[0]) for line in FLOORS.strip().splitlines() for name in line.split()[1:]}
BACKENDS = {"_native", "_torch", "_linear_torch", "_evidence_torch", "reference"}


def unit_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py").removesuffix(".pyi")


def package_of(path: Path) -> list[str]:
    """The package that a relative import of one dot means, as parts: ["regard", "masks"]."""
    return ["regard", *path.relative_to(SOURCE).parent.parts]


def imported(node: ast.AST, package: list[str]) -> list[list[str]]:
    """The modules, as parts, that an import statement may load. `from a import b` may load a.b."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".") for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        return [[*base, alias.name] for alias in node.names]
    return []


def units_used(path: Path) -> set[str]:
    """Units of regard that a file imports, at any depth of the code, for types or for use."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    modules = [m for node in ast.walk(tree) for m in imported(node, package_of(path))]
    names = {m[1] if len(m) > 1 else "__init__" for m in modules if m[0] == "regard"}
    return {name if known(name) else "__init__" for name in names} - {unit_of(path)}


def known(name: str) -> bool:
    return name in FLOOR or (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()


FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")
EDGES = sorted({(unit_of(p), used) for p in FILES for used in units_used(p)})


def test_the_package_is_here() -> None:
    assert FILES, f"no modules under {SOURCE}"


@pytest.mark.parametrize("unit", sorted({unit_of(p) for p in FILES}))
def test_every_unit_has_a_floor(unit: str) -> None:
    assert unit in FLOOR, f"{unit} has no floor; add it to FLOORS and to DESIGN.md section 2"


@pytest.mark.parametrize(("unit", "used"), EDGES)
def test_imports_go_down(unit: str, used: str) -> None:
    assert used != "__init__", (
        f"{unit} imports from `regard` itself; import the private module that has the name"
    )
    assert FLOOR[used] <= FLOOR[unit], (
        f"{unit} (floor {FLOOR[unit]:g}) imports {used} (floor {FLOOR[used]:g})"
    )
    assert not {unit, used} <= BACKENDS, f"backends never import each other: {unit} imports {used}"
    assert used != "_core" or unit == "_native", f"only _native.py touches the compiled core, not {unit}"


def test_no_cycles() -> None:
    below = {unit: {used for u, used in EDGES if u == unit} for unit, _ in EDGES}
    while leaves := [unit for unit, used in below.items() if not used & below.keys()]:
        for unit in leaves:
            del below[unit]
    assert not below, f"these units import each other in a circle: {sorted(below)}"


@pytest.mark.parametrize(
    ("statement", "package", "modules"),
    [
        ("import regard._problem", ["regard"], [["regard", "_problem"]]),
        ("from . import masks", ["regard"], [["regard", "masks"]]),
        ("from .masks import Causal", ["regard"], [["regard", "masks", "Causal"]]),
        ("from .._problem import Spec", ["regard", "masks"], [["regard", "_problem", "Spec"]]),
        ("from .atoms import Window", ["regard", "masks"], [["regard", "masks", "atoms", "Window"]]),
    ],
)
def test_imports_are_understood(statement: str, package: list[str], modules: list[list[str]]) -> None:
    assert imported(ast.parse(statement).body[0], package) == modules
