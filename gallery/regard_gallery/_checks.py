"""Argument checks that models, applications and the comparison share."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def describe(value: object) -> str:
    """Returns a description of a value for error messages.

    A tensor is described by dtype and shape, any other value by type and repr.
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]


def count(name: str, value: Any, least: int = 0) -> int:
    """Returns `value`. Raises unless it is an int (not a bool) that is at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    if value < least:
        raise ValueError(f"{name}: expected an integer from {least} on, got {value}")
    return value


def check_images(images: Tensor, shape: tuple[int, int, int]) -> None:
    """Raises ValueError unless `images` has the shape (B, *shape) for some batch size B."""
    if images.shape[1:] != shape:
        raise ValueError(f"images: expected (B, {', '.join(map(str, shape))}), got {describe(images)}")
