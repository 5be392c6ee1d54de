"""Checks limits on the structure of the code, such as its number of lines.

`python tools/figures.py` prints the figures and exits with 1 if one exceeds its limit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIBRARY, NATIVE, GALLERY, TESTS = (ROOT / name for name in ("src/regard", "native", "gallery", "tests"))
OPTIONS = {"mask", "bias", "scale", "softcap", "sink"}
NOT_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Figure(NamedTuple):
    name: str
    value: int
    limit: int


def docstring(node: ast.AST) -> ast.Expr | None:
    """Returns the docstring node of a module, class or function, or None."""
    if not isinstance(node, ast.Module | ast.ClassDef | Function) or not node.body:
        return None
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


def python_lines(path: Path) -> int:
    """Counts the lines with code, without comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in NOT_CODE for n in range(t.start[0], t.end[0] + 1)}
    for doc in filter(None, map(docstring, ast.walk(ast.parse(text)))):
        lines.difference_update(range(doc.lineno, (doc.end_lineno or 0) + 1))
    return len(lines)


def other_lines(path: Path) -> int:
    """Counts the lines of C++, JavaScript, CSS or HTML that are neither blank nor a comment."""
    text = re.sub(r"/\*.*?\*/|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.S)
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("//"))


def files(folder: Path, *suffixes: str) -> list[Path]:
    """Returns the files in `folder` with one of the suffixes, except tests."""
    return [p for p in sorted(folder.rglob("*")) if p.suffix in suffixes and "tests" not in p.parts[-3:]]


def nodes(paths: list[Path], kind: type | tuple[type, ...]) -> Iterator[ast.AST]:
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        yield from (node for node in ast.walk(tree) if isinstance(node, kind))


def lists_options(function: ast.AST) -> bool:
    """Returns whether a function has all score options of `attention` as parameters.

    Returns False for overloads.
    """
    assert isinstance(function, Function)
    if any("overload" in ast.unparse(decorator) for decorator in function.decorator_list):
        return False
    return {a.arg for a in function.args.args + function.args.kwonlyargs} >= OPTIONS


def figures() -> Iterator[Figure]:
    budget = tomllib.loads((ROOT / "tools/budget.toml").read_text(encoding="utf-8"))
    python = files(LIBRARY, ".py")
    others = files(NATIVE, ".cpp", ".h") + files(LIBRARY, ".js", ".css", ".html")
    library = sum(map(python_lines, python)) + sum(map(other_lines, others))
    gallery = sum(map(python_lines, files(GALLERY, ".py")))
    yield Figure("lines of code of the library", library, budget["library"])
    yield Figure("lines of code with the gallery", library + gallery, budget["whole"])
    yield Figure("Python files at the root of the library", len(list(LIBRARY.glob("*.py"))), 10)
    classes = Counter(node.name for node in nodes(python, ast.ClassDef))  # type: ignore[attr-defined]
    yield Figure("class names defined twice", sum(1 for count in classes.values() if count > 1), 0)
    listing = sum(map(lists_options, nodes(python, (ast.FunctionDef, ast.AsyncFunctionDef))))
    yield Figure("signatures that list the options", listing, 10)
    touching = [p for p in python if "torch._C" in p.read_text(encoding="utf-8")]
    yield Figure("files that name torch._C", len(touching), 1)
    stubs = "".join(p.read_text(encoding="utf-8") for p in LIBRARY.rglob("*.pyi"))
    yield Figure("unnamed arguments in the stub of the core", len(re.findall(r"\barg\d*\b", stubs)), 0)
    yield Figure("test files at the top of tests", len(list(TESTS.glob("test_*.py"))), 5)
    tests = [*TESTS.rglob("test_*.py"), *GALLERY.rglob("test_*.py")]
    imported = [getattr(node, "module", None) or "" for node in nodes(tests, ast.ImportFrom)]
    yield Figure("imports of a test by a test", sum("test_" in name for name in imported), 0)


def main() -> int:
    measured = list(figures())
    for name, value, limit in measured:
        print(f"{name:<44}{value:>8,}   at most {limit:>6,}{'' if value <= limit else '   OVER'}")
    return int(any(figure.value > figure.limit for figure in measured))


if __name__ == "__main__":
    sys.exit(main())
