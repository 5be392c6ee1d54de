"""The weights of each layer of a stack, for pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from regard import evidence, weights
from regard.facts import Rows
from regard.nn import PreNorm, Stack

Asked = tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]  # (q, k, v) and options of a call


def layer_weights(stack: Stack, x: Tensor) -> list[Tensor]:
    """For tokens x (..., L, d_model), (..., H, L, L) of each layer."""
    return [weights(*qkv, **options) for qkv, options in _asked(stack, x)]


def layer_rows(stack: Stack, x: Tensor, query: int) -> list[Tensor]:
    """The weights of one query, (..., H, L) of each layer, at O(L) memory."""
    wanted = Rows([query])
    return [evidence(*qkv, wanted, **options)[0][..., 0, :] for qkv, options in _asked(stack, x)]


def _asked(stack: Stack, x: Tensor) -> Iterator[Asked]:
    """What each layer asks of attention."""
    for block in stack.blocks:
        residual = block.attention
        if not isinstance(residual, PreNorm):
            raise TypeError(f"stack: expected blocks with PreNorm, got {type(residual).__name__}")
        yield residual.sublayer.arguments(residual.norm(x))  # type: ignore[operator]
        x = block(x)
