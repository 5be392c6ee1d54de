"""The weights of each layer of a stack, for pictures."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._attention import weights
from ..nn import PreNorm, Stack


def layer_weights(stack: Stack, x: Tensor, **options: Any) -> list[Tensor]:
    """For tokens x (..., L, d_model), (..., H, L, L) of each layer; `options` are those of the stack."""
    found = []
    for block in stack.blocks:
        residual = block.attention
        if not isinstance(residual, PreNorm):
            raise TypeError(f"stack: expected blocks with PreNorm, got {type(residual).__name__}")
        qkv, own = residual.sublayer.arguments(residual.norm(x))  # type: ignore[operator]
        found.append(weights(*qkv, **own))
        x = block(x, **options)
    return found
