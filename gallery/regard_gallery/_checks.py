"""Argument checks that models, applications and the comparison share."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def describe(value: object) -> str:
    """Describes a value for error messages: tensors by dtype and shape, others by type and repr."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]


def count(name: str, value: Any, least: int = 0) -> int:
    """Returns `value`. Raises unless it is an int, not a bool, of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    if value < least:
        raise ValueError(f"{name}: expected an integer from {least} on, got {value}")
    return value


def check_images(images: Tensor, shape: tuple[int, int, int]) -> None:
    """Raises ValueError unless the images have the shape (B, *shape)."""
    if images.shape[1:] != shape:
        raise ValueError(f"images: expected (B, {', '.join(map(str, shape))}), got {describe(images)}")
