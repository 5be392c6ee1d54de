"""What models of images ask of their input."""

from __future__ import annotations

from torch import Tensor

from ..._checks import describe


def check_images(images: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise unless images are (B, *shape)."""
    if images.shape[1:] != shape:
        raise ValueError(f"images: expected (B, {', '.join(map(str, shape))}), got {describe(images)}")
