"""Loads scripts of this repository that are not in a package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from support import ROOT


def load_script(path: str) -> ModuleType:
    """Imports a script by its path in the repository, as a module named after its file."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
