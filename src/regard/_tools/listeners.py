"""Listeners, such as `see.capture`, that are notified of every call of `attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Listener = Callable[[Tensor, Tensor, dict[str, Any]], None]

listeners: list[Listener] = []


@torch.compiler.disable  # type: ignore[untyped-decorator]
def notify(q: Tensor, k: Tensor, **options: Any) -> None:
    """Passes q, k and the options of a call to every listener.

    Calls of `attention` that a listener makes itself notify no listener.
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
    """Notifies `listener` of every call of `attention` within a `with` block."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
