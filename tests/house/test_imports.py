"""The import contract: `[tool.importlinter]` of pyproject.toml, and two rules beyond import-linter.

Tests also break each rule in a copy of the sources and check that the violation is found.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

NATIVE = "regard._backends.native."


def modules(path: Path, package: str) -> Iterator[str]:
    """Yields the modules that the imports of a file may load: `from a import b` may load a.b."""
    parents = package.split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base = [*base, node.module] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imports(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    """Yields (module, imported module) for the files below a folder, except tests."""
    for path in sorted((root / folder).rglob("*.py")):
        module = path.relative_to(root / folder).with_suffix("").parts
        if "tests" not in module and module[0] != "conftest":
            yield from ((".".join(module), used) for used in modules(path, ".".join(module[:-1])))


def importers_of_the_core(root: Path) -> list[str]:
    """Returns the modules outside the native backend that import the compiled core."""
    return [m for m, used in imports(root, "src") if used == "regard._core" and not m.startswith(NATIVE)]


def private_imports_of_the_gallery(root: Path) -> list[str]:
    """Returns the private modules and names of the library that the gallery imports."""
    used = [used.split(".") for _, used in imports(root, "gallery")]
    return [".".join(parts) for parts in used if parts[0] == "regard" and any(p[0] == "_" for p in parts[1:])]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the sources below `root`.

    Python runs without `site`, because an editable install would replace these sources.
    """
    site = Path(pytest.importorskip("importlinter").__file__).parents[1]
    run = "from importlinter.cli import lint_imports_command as main; main(['--no-cache'])"
    path = os.pathsep.join(map(str, (root / "src", root / "gallery", site)))
    return subprocess.run(
        [sys.executable, "-S", "-c", run],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the Python sources in which a test may break a rule."""
    python_only = shutil.ignore_patterns("*.so", "*.js", "*.css", "*.html", "__pycache__", "tests")
    for folder in ("src/regard", "gallery/regard_gallery"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=python_only)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def add_import(root: Path, file: str, line: str) -> None:
    path = root / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")


def test_the_contract_holds() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout
    assert not importers_of_the_core(ROOT)
    assert not private_imports_of_the_gallery(ROOT)


BROKEN = {
    "upwards": ("src/regard/masks/_mask.py", "from .._call import spec", "Folders are floors"),
    "upwards, inside a function": (
        "src/regard/_call/make.py", "def late(): from .._api import attention", "Folders are floors",
    ),
    "through the package": (
        "src/regard/_tools/modes.py", "from regard import attention", "Folders are floors",
    ),
    "a circle": ("src/regard/scores.py", "from .masks import Mask as Other", "No circles"),
    "another backend": (
        "src/regard/_backends/reference/__init__.py", "from ..torch import tiles", "Backends do not import",
    ),
    "the gallery": ("src/regard/info.py", "import regard_gallery", "The library does not import the gallery"),
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_contract_fails(rule: str, copy: Path) -> None:
    file, line, contract = BROKEN[rule]
    if rule == "a circle":
        add_import(copy, "src/regard/masks/_mask.py", "from ..scores import Alibi as Other")
    add_import(copy, file, line)
    result = lint(copy)
    assert result.returncode == 1, result.stdout
    broken = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert any(text.startswith(contract) for text in broken), result.stdout


def test_a_unit_without_a_floor_fails(copy: Path) -> None:
    (copy / "src/regard/stray.py").touch()
    result = lint(copy)
    assert result.returncode == 1
    assert "stray" in result.stdout


def test_an_import_of_the_core_is_found(copy: Path) -> None:
    add_import(copy, "src/regard/_api/attention.py", "from .. import _core")
    assert importers_of_the_core(copy) == ["regard._api.attention"]


def test_a_private_import_of_the_gallery_is_found(copy: Path) -> None:
    add_import(copy, "gallery/regard_gallery/_checks.py", "from regard.nn import _weights")
    assert private_imports_of_the_gallery(copy) == ["regard.nn._weights"]
