"""Listeners of attention calls: calls of other threads and of the listeners themselves."""

from __future__ import annotations

import threading
from typing import Any

import torch

import regard
from regard._tools.listeners import listeners, listening


def test_a_slow_listener_hides_no_call_of_another_thread() -> None:
    """While one thread runs its listener, a call of another thread notifies the listeners too."""
    x = torch.randn(1, 1, 3, 4)
    entered, may_end = threading.Event(), threading.Event()
    threads: list[int] = []

    def listener(q: Any, k: Any, options: dict[str, Any]) -> None:
        threads.append(threading.get_ident())
        regard.attention(x, x, x)  # the listener's own call, which notifies nobody
        if threading.current_thread() is other:
            entered.set()
            assert may_end.wait(30)

    other = threading.Thread(target=lambda: regard.attention(x, x, x))
    with listening(listener):
        other.start()
        assert entered.wait(30)
        regard.attention(x, x, x)
        may_end.set()
        other.join()
    assert threads == [other.ident, threading.get_ident()]
    assert listeners == []
