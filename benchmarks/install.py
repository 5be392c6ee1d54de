"""Installs the packages of `make bench-peers`, for each engine into a folder in build/peers.

Nothing in .venv changes. An engine's process finds .venv's packages, too, so that torch and NumPy
are not installed again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "peers"
PINS = ROOT / "requirements" / "peers.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1")
Run = Callable[..., object]  # runs a command, with its output in the log of the installation


def pins(packages: Sequence[str]) -> list[str]:
    """Returns the packages with the versions of requirements/peers.txt: ["jax==0.10.2", ...]."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    return [f"{package}=={versions[package]}" for package in packages]


def ensure(folder: str, packages: Sequence[str], build: Callable[[Path, Sequence[str], Run], None]) -> str:
    """Calls `build(folder, pins, run)` unless build/peers/`folder` has these versions.

    Returns an error message, or "".
    """
    home, wanted = HOME / folder, pins(packages)
    marker, log = home / "pins.txt", HOME / f"{folder}.log"
    if marker.exists() and marker.read_text(encoding="utf-8").split() == wanted:
        return ""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with open(log, "w", encoding="utf-8") as output:
        try:
            build(home, wanted, logged(output))
        except (OSError, subprocess.CalledProcessError) as error:
            return f"not installed: {type(error).__name__}; see {log.relative_to(ROOT)}"
    marker.write_text("\n".join(wanted), encoding="utf-8")
    return ""


def logged(output: IO[str]) -> Run:
    """Returns a function that runs a command, writes what it prints to `output` and checks its exit code."""
    return lambda *command: subprocess.run(command, stdout=output, stderr=output, check=True)


def with_pip(home: Path, wanted: Sequence[str], run: Run) -> None:
    run(*PIP, "install", "--no-deps", "--target", str(home), *wanted)
