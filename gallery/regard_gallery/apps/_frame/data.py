"""Finds and reads the applications' data files. If one is missing, the error names the command
that installs it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...models._packages import directory

MAX_BYTES = 256 << 20
FOLDER = Path(os.environ.get("REGARD_DATA", "build/data"))  # the folder that `make data` fills


def package_file(package: str, *parts: str) -> Path:
    """Returns the path of a file in an installed package, without importing the package."""
    path = directory(package.replace("-", "_"), package, "data").joinpath(*parts)
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}: expected in the package {package}, not found in {path.parent}")
    return bounded(path)


def first_of(places: Sequence[str | Path], what: str, command: str = "make data") -> Path:
    """Returns the first of `places` that exists.

    If none exists, raises a FileNotFoundError that names the data (`what`) and the command that
    installs them (`command`).
    """
    for place in map(Path, places):
        if place.exists():
            return place
    missing = f"{what}: expected in one of {', '.join(map(str, places))}; this brings it: {command}"
    raise FileNotFoundError(f"{missing}. REGARD_DATA may name another folder")


def bounded(path: Path) -> Path:
    """Returns `path`. Raises ValueError if the file is larger than MAX_BYTES."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path}: expected at most {MAX_BYTES} bytes, got {size}")
    return path


def rows(path: Path) -> list[list[str]]:
    """Reads a tab-separated file. Skips the header line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines[1:]]
