"""Contents of the compiled files.

A kernel object must export only its table: the linker could use other exported AVX2 code on any
CPU.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import HAVE_CORE, ROOT

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


FAMILIES = {path.stem for path in (ROOT / "native/kernels").glob("*.cpp")}


def kernel_objects() -> dict[tuple[str, str], Path]:
    """Returns the newest object of each instruction set and family: {("avx2", "forward"): path}."""
    built = sorted(
        ROOT.glob("build/editable/**/kernels_*.dir/**/*.cpp.o"), key=lambda path: path.stat().st_mtime
    )
    objects = {
        (re.search(r"kernels_(\w+)\.dir", str(p)).group(1), p.name.removesuffix(".cpp.o")): p for p in built
    }
    return {key: path for key, path in sorted(objects.items()) if key[1] in FAMILIES}


OBJECTS = kernel_objects()
each_object = pytest.mark.parametrize(("isa", "family"), list(OBJECTS))


def run(*command: object) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def symbols(path: Path, *options: str) -> dict[str, str]:
    """Returns {name: nm's letter} for the symbols that `nm options` prints."""
    pairs = [line.split()[-2:] for line in run("nm", *options, path).splitlines()]
    return {name: letter for letter, name in pairs}


@pytest.fixture(scope="module")
def core() -> Path:
    spec = importlib.util.find_spec("regard._core")
    assert spec is not None
    return Path(str(spec.origin))


def test_objects_were_found() -> None:
    expected = {(isa, family) for isa in ("generic", "wide") for family in FAMILIES}
    assert expected <= OBJECTS.keys(), "the core exists but its objects do not; run `make build`"


@each_object
def test_one_table_is_exported(isa: str, family: str) -> None:
    table = "kernels" if family == "isa" else family
    assert list(symbols(OBJECTS[isa, family], "-g", "--defined-only")) == [f"regard_{table}_{isa}"]


@each_object
def test_no_weak_symbols(isa: str, family: str) -> None:
    weak = [name for name, letter in symbols(OBJECTS[isa, family]).items() if letter in "wWvVu"]
    assert not weak, "the linker could choose these for code that must run on any CPU"


@each_object
def test_no_cpp_symbols_are_needed(isa: str, family: str) -> None:
    assert not [name for name in symbols(OBJECTS[isa, family], "-u") if name.startswith("_Z")]


@each_object
def test_no_static_initialisers(isa: str, family: str) -> None:
    sections = run("objdump", "-h", OBJECTS[isa, family])
    assert ".init_array" not in sections
    assert ".ctors" not in sections


@pytest.mark.parametrize(("isa", "family"), [key for key in OBJECTS if key[0] in {"generic", "wide"}])
def test_baseline_objects_hold_no_avx(isa: str, family: str) -> None:
    assert not re.findall(
        r"%[yz]mm\d+|\tv\w+ ", run("objdump", "-d", "--no-show-raw-insn", OBJECTS[isa, family])
    )[:5]


def test_the_core_links_no_torch_and_no_openmp(core: Path) -> None:
    needed = re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", core))
    assert needed
    assert not [name for name in needed if re.search("torch|c10|omp|mkl", name)]


def test_the_core_exports_only_its_module(core: Path) -> None:
    assert list(symbols(core, "-D", "--defined-only", "-g")) == ["PyInit__core"]


def test_loading_the_core_keeps_denormals(core: Path) -> None:
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("regard._core", {str(core)!r})
importlib.util.module_from_spec(spec)
assert float("5e-324") * 1.0 > 0.0, "denormals are flushed to zero"
"""
    run(sys.executable, "-c", code)


def test_fast_math_start_up_is_not_linked(core: Path) -> None:
    assert "ldmxcsr" not in run("objdump", "-d", "--no-show-raw-insn", core)


def test_stub_matches_the_core() -> None:
    tree = ast.parse((ROOT / "src/regard/_core.pyi").read_text(encoding="utf-8"))
    stub = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    stub |= {
        n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    core = importlib.import_module("regard._core")
    assert stub == {name for name in vars(core) if not name.startswith("__")}, "run `make stubs`"
