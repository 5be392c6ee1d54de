"""The modules of benchmarks/, which are scripts outside any package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support import ROOT

BENCHMARKS = ROOT / "benchmarks"


class Modules:
    """The modules of benchmarks/ as attributes, imported on first use."""

    def __getattr__(self, name: str) -> ModuleType:
        if not list(BENCHMARKS.glob(f"{name}*")):
            raise AttributeError(name)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def bench() -> Iterator[Modules]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield Modules()
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name, module in list(sys.modules.items()):
            if BENCHMARKS in Path(getattr(module, "__file__", None) or "").parents:
                del sys.modules[name]
