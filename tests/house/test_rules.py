"""House rules: short functions, a thin binding, no machine-specific paths or addresses."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

PYTHON_LIMIT, CPP_LIMIT, BIND_LIMIT = 60, 80, 200


def tracked() -> list[Path]:
    """Returns the files that git tracks or would add; without git, all but generated files."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        generated = re.compile(r"\.git/|\.venv/|build/|.*_cache(__)?/|\.hypothesis/|.*\.egg-info/")
        return [p for p in ROOT.rglob("*") if p.is_file() and not generated.match(str(p.relative_to(ROOT)))]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


FILES = tracked()
PYTHON = [p for p in FILES if p.suffix == ".py"]
CPP = [p for p in FILES if p.suffix in {".cpp", ".h"}]


def names(paths: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in paths]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the lines from `def` to the end, without the docstring."""
    first = function.body[0]
    is_doc = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and type(first.value.value) is str
    )
    doc = (first.end_lineno or 0) - first.lineno + 1 if is_doc else 0
    return (function.end_lineno or 0) - function.lineno + 1 - doc


def blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def without_comments_and_strings(text: str) -> str:
    """Removes comments, literals and preprocessor lines from C++. Line numbers do not change."""
    text = re.sub(r'R"(\w*)\(.*?\)\1"', blank, text, flags=re.S)
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yields (heading, lines) of each function that is not nested in another."""
    text = without_comments_and_strings(text)
    inside, function, start = 0, None, 0
    for brace in re.finditer(r"[{}]", text):
        if brace.group() == "}":
            inside -= function is not None
            if function is not None and inside == 0:
                yield function, text.count("\n", start, brace.end()) + 1
                function = None
        elif function is not None:
            inside += 1
        else:
            heading = re.split(r"[;{}]", text[: brace.start()])[-1].strip()
            if re.search(r"\)[^=]*$", heading):
                function, inside = " ".join(heading.split()), 1
                start = text.rindex(heading, 0, brace.start())


@pytest.mark.parametrize("path", PYTHON, ids=names(PYTHON))
def test_python_functions_are_short(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: code_lines(f) for f in functions if code_lines(f) > PYTHON_LIMIT}
    assert not long, f"over {PYTHON_LIMIT} lines"


@pytest.mark.parametrize("path", CPP, ids=names(CPP))
def test_cpp_functions_are_short(path: Path) -> None:
    functions = cpp_functions(path.read_text(encoding="utf-8"))
    long = {heading[-80:]: lines for heading, lines in functions if lines > CPP_LIMIT}
    assert not long, f"over {CPP_LIMIT} lines"


def test_cpp_functions_are_found() -> None:
    shell = "#define F(x) {\nnamespace {\nstruct A {\n  int f() const { return 1; }\n};\n"
    text = shell + "void g(int x) {\n  if (x) {\n    y(); // }\n  }\n}\n}"
    assert list(cpp_functions(text)) == [("int f() const", 1), ("void g(int x)", 5)]


def test_the_binding_is_thin() -> None:
    bind = ROOT / "native" / "bind" / "bind.cpp"
    assert len(bind.read_text(encoding="utf-8").splitlines()) < BIND_LIMIT


# Split, so that this file does not match its own pattern.
MACHINE_SPECIFIC = re.compile(
    r"(?<![\w.~$}])/(?:home|root|work|Users|opt/wheels)/\w"
    r"|(?:index-url|find-links)[ =]+[\"']?\w+:/" + "/"
    r"|\b(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?=[:/])"
)


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_no_machine_specific_text(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    matches = [match.group() for match in MACHINE_SPECIFIC.finditer(text)]
    assert not matches
    assert str(ROOT) not in text


TIMERS = re.compile(r"perf_counter\(|\btimeout=\d|ITIMER_REAL|threading\.Timer")
TESTS = [
    p
    for p in PYTHON
    if "tests" in p.relative_to(ROOT).parts and p.name not in ("test_browser.py", "test_rules.py")
]


@pytest.mark.parametrize("path", TESTS, ids=names(TESTS))
def test_tests_do_not_depend_on_the_clock(path: Path) -> None:
    """On a busy machine clock times are arbitrary: limits count CPU time.

    A test that hangs is ended by the limit in pyproject.toml.
    """
    assert not TIMERS.findall(path.read_text(encoding="utf-8"))
