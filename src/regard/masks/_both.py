"""Combines two optional masks, such as the mask of a layer and the mask of a call."""

from __future__ import annotations

from torch import Tensor

from .._tools.arguments import describe
from ._atoms import Dense
from ._mask import Mask


def both(a: Mask | None, b: Mask | Tensor | None) -> Mask | None:
    """Returns `a & b`, where None allows everything. A bool tensor b becomes a `Dense` mask."""
    if not (b is None or isinstance(b, Mask | Tensor)):
        raise TypeError(f"mask: expected a Mask or a bool tensor (True = may attend), got {describe(b)}")
    other = Dense(b) if isinstance(b, Tensor) else b
    if a is None or other is None:
        return other if a is None else a
    return a & other
