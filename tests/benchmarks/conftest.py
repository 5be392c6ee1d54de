"""The modules of benchmarks/, which are scripts outside any package."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import pytest

from support import ROOT

BENCHMARKS = ROOT / "benchmarks"
MODULES = sorted(path.stem for path in BENCHMARKS.glob("*.py")) + ["engines"]


@pytest.fixture(scope="module")
def bench() -> Any:
    """Returns the modules of benchmarks/ by name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        modules = {name: importlib.import_module(name) for name in MODULES}
        yield argparse.Namespace(**modules)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in [name for name in sys.modules if name.split(".")[0] in MODULES]:
            del sys.modules[name]
