"""The memory of checked calls: a call like an earlier one skips the checks."""

from __future__ import annotations

from typing import Any, TypeVar

MAX_SPECS = 4096

Key = tuple[Any, ...]
T = TypeVar("T")


def remember(memory: dict[Key, T], key: Key, value: T) -> T:
    """Keeps the checked form of a call under its signature. A full memory begins anew."""
    if len(memory) >= MAX_SPECS:
        memory.clear()
    memory[key] = value
    return value
