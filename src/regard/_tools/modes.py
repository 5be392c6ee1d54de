"""A context manager that puts modules into evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Puts modules into evaluation mode for a `with` block, then restores each submodule's mode."""
    modes = [(submodule, submodule.training) for module in modules for submodule in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training
