"""Modules in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Puts modules into evaluation mode for a `with` block, then each of their parts back into its own."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
