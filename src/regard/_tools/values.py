"""Frozen objects that are compared, hashed and printed by their contents."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from .arguments import brief, readable, same

V = TypeVar("V", bound="Value")


def value(cls: type[V]) -> type[V]:
    """Makes a subclass of Value a frozen dataclass.

    The class keeps the `__init__` that it defines.
    """
    cls = dataclass(frozen=True, eq=False, repr=False, init=False)(cls)
    cls._names = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
    return cls


class Value:
    """A base class of objects that are compared and hashed by the values of their fields."""

    _names: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or all(_equal(content, getattr(other, name)) for name, content in self._items())

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        shown = ", ".join(brief(content) for _, content in self._items() if content is not None)
        return f"{type(self).__name__}({shown})"

    def __getstate__(self) -> dict[str, Any]:
        return dict(self._items())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _set(self, **content: object) -> None:
        self.__dict__.update(content)

    def _items(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in self._names)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, *(_fingerprint(content) for _, content in self._items())))


def _equal(a: Any, b: Any) -> bool:
    return same(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a is b or a == b)


def _fingerprint(content: Any) -> object:
    """Returns a hashable value, equal for equal contents. For a tensor: dtype, shape and sum."""
    if not isinstance(content, Tensor):
        return content
    total = content.sum().item() if readable(content) else None
    return content.dtype, tuple(content.shape), total
