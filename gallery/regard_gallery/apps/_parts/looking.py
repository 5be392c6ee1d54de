"""Computes the attention weights of every layer of a stack, for pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from regard import evidence, weights
from regard.facts import Rows
from regard.nn import PreNorm, Stack

Arguments = tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]  # (q, k, v) and options of `attention`


def layer_weights(stack: Stack, x: Tensor) -> list[Tensor]:
    """Returns each layer's attention weights (..., H, L, L) for inputs x (..., L, d_model)."""
    return [weights(*qkv, **options) for qkv, options in _arguments(stack, x)]


def layer_rows(stack: Stack, x: Tensor, query: int) -> list[Tensor]:
    """Returns each layer's attention weights (..., H, L) of one query, in O(L) memory."""
    row = Rows([query])
    return [evidence(*qkv, row, **options)[0][..., 0, :] for qkv, options in _arguments(stack, x)]


def _arguments(stack: Stack, x: Tensor) -> Iterator[Arguments]:
    """Yields the arguments with which each layer calls `attention`, given x (..., L, d_model)."""
    for block in stack.blocks:
        residual = block.attention
        if not isinstance(residual, PreNorm):
            raise TypeError(f"stack: expected blocks with PreNorm, got {type(residual).__name__}")
        yield residual.sublayer.arguments(residual.norm(x))  # type: ignore[operator]
        x = block(x)
