"""Data from packages: where it lies, and the one command that brings it if it is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...models._packages import directory

MAX_BYTES = 256 << 20
FOLDER = Path(os.environ.get("REGARD_DATA", "build/data"))  # what `make data` brings


def package_file(package: str, *parts: str) -> Path:
    """A file inside an installed package from PyPI, which is not imported."""
    path = directory(package.replace("-", "_"), package, "data").joinpath(*parts)
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}: expected in the package {package}, not found in {path.parent}")
    return bounded(path)


def first_of(places: Sequence[str | Path], what: str, command: str = "make data") -> Path:
    """The first of these places that is there: for data that is not in an installed package."""
    for place in map(Path, places):
        if place.exists():
            return place
    missing = f"{what}: expected in one of {', '.join(map(str, places))}; this brings it: {command}"
    raise FileNotFoundError(f"{missing}. REGARD_DATA may name another folder")


def bounded(path: Path) -> Path:
    """The file, if it has a size that is to be expected."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path}: expected at most {MAX_BYTES} bytes, got {size}")
    return path


def parquet(path: Path, *columns: str) -> dict[str, list[Any]]:
    """These columns of a Parquet file."""
    from pyarrow.parquet import read_table

    found: dict[str, list[Any]] = read_table(path, columns=list(columns), use_threads=False).to_pydict()
    return found


def rows(path: Path) -> list[list[str]]:
    """The lines of a text file, cut into columns; the first, which names them, is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines[1:]]
