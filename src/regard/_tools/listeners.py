"""Listeners that are notified of every call of `attention`, such as `see.capture`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .watching import uncompiled

Listener = Callable[[Tensor, Tensor, dict[str, Any]], None]

listeners: list[Listener] = []


@uncompiled
def notify(q: Tensor, k: Tensor, **options: Any) -> None:
    """Passes q, k and the options of a call to every listener.

    A listener's own calls of `attention` notify no listener.
    """
    notified = listeners[:]
    listeners.clear()
    try:
        for listener in notified:
            listener(q, k, options)
    finally:
        listeners[:] = notified


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Registers a listener for a `with` block."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
