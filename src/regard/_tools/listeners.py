"""Who wants to hear of each call of attention. Most of the time nobody does; `see.capture` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Listener = Callable[[Tensor, Tensor, dict[str, Any]], None]

listeners: list[Listener] = []


@torch.compiler.disable  # type: ignore[untyped-decorator]
def tell(q: Tensor, k: Tensor, **options: Any) -> None:
    """Called with what the weights come from. Calls that a listener makes itself are not told."""
    told = listeners[:]
    listeners.clear()
    try:
        for listener in told:
            listener(q, k, options)
    finally:
        listeners[:] = told


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
