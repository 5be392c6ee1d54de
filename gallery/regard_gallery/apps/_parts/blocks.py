"""Builds a stack of transformer blocks from its sizes, for the models of several applications."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard.nn import Block, EncoderBlock, Stack


@dataclass(frozen=True)
class Blocks:
    """The sizes of a stack of transformer blocks. The method `stack` builds the stack."""

    d_model: int = 64
    heads: int = 4
    layers: int = 3
    hidden: int | None = None  # hidden width of the feed-forward layers; None: the block's default
    dropout: float = 0.0  # dropout of the attention weights

    def stack(self, block: Callable[..., Block] = EncoderBlock, **options: Any) -> Stack:
        """Returns a stack of blocks with a final LayerNorm. `options` are passed to every block."""
        sizes = {"hidden": self.hidden, "dropout": self.dropout} | options
        blocks = (block(self.d_model, self.heads, **sizes) for _ in range(self.layers))
        return Stack(blocks, nn.LayerNorm(self.d_model))
