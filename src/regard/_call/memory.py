"""A bounded cache of checked calls: a call with a known signature skips the checks."""

from __future__ import annotations

from typing import Any, TypeVar

MAX_SPECS = 4096

Key = tuple[Any, ...]
T = TypeVar("T")


def remember(memory: dict[Key, T], key: Key, value: T) -> T:
    """Stores `value` in the cache under a call's signature and returns it.

    Clears a full cache first.
    """
    if len(memory) >= MAX_SPECS:
        memory.clear()
    memory[key] = value
    return value
