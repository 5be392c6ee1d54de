"""The package's names are imported on first use, without modules that a call does not need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import regard

HEAVY = ("torch", "numpy", "rich", "matplotlib", "transformers")
COMPILER = ("torch._dynamo", "torch._inductor", "sympy")


def loaded(code: str) -> set[str]:
    """Runs code in a fresh interpreter and returns the names of the modules that it has imported."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_does_not_import_torch() -> None:
    assert not loaded("import regard; regard.__version__").intersection(HEAVY)


def test_first_call_imports_no_compiler_and_little_beyond_torch() -> None:
    before = loaded("import torch")
    after = loaded("import regard, torch; x = torch.ones(1, 2, 3, 4); regard.attention(x, x, x)")
    assert "regard._api.attention" in after
    assert not after.intersection(COMPILER)
    assert not after.intersection(
        {"regard.nn", "regard.see", "regard.cost", "regard.convert", "regard.cache"}
    )
    assert len(after - before) <= 100


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_command_does_not_import_torch(argument: str) -> None:
    pytest.importorskip("typer")
    code = f"import sys\nsys.argv = ['regard', '{argument}']\nfrom regard.cli import main"
    modules = loaded(code + "\ntry: main()\nexcept SystemExit: pass")
    assert "typer" in modules
    assert not modules.intersection(HEAVY)


def test_every_public_name_resolves_and_is_seen_by_type_checkers() -> None:
    tree = ast.parse(Path(regard.__file__).read_text(encoding="utf-8"))
    checked = {
        a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names
    }
    assert set(regard.__all__) <= checked
    assert set(regard.__all__) <= set(dir(regard))
    for name in regard.__all__:
        assert getattr(regard, name).__name__.split(".")[-1] == name


def test_no_public_module_imports_the_compiler() -> None:
    modules = loaded(f"import regard\nfor name in {regard.__all__}: getattr(regard, name)")
    assert "regard.convert" in modules
    assert not modules.intersection(COMPILER)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'atention'"):
        regard.atention  # noqa: B018
