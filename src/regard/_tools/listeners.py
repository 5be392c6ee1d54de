"""Listeners, such as `see.capture`, that are notified of every call of `attention`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .watching import uncompiled

Listener = Callable[[Tensor, Tensor, dict[str, Any]], None]

listeners: list[Listener] = []
_thread = threading.local()


@uncompiled
def notify(q: Tensor, k: Tensor, **options: Any) -> None:
    """Passes q, k and the options of a call to every listener.

    Calls of `attention` that a listener makes itself notify no listener.
    """
    if getattr(_thread, "is_notifying", False):
        return
    _thread.is_notifying = True
    try:
        for listener in listeners[:]:
            listener(q, k, options)
    finally:
        _thread.is_notifying = False


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Notifies `listener` of every call of `attention` within a `with` block."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
