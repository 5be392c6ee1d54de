"""A policy with causal attention over its latest observations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from regard.masks import Window
from regard.nn import CacheLike, DecoderBlock
from regard.positions import Rotary

from .._parts.blocks import Blocks
from .._parts.looking import layer_weights

BLOCKS = Blocks(layers=2)


class HistoryPolicy(nn.Module):
    """Maps observations (B, L, observed) to action logits (B, L, actions) and state values (B, L).

    Each layer attends to the current observation and the `history` observations before it.
    """

    def __init__(self, observed: int, actions: int, history: int, blocks: Blocks = BLOCKS) -> None:
        super().__init__()
        d_model, position = blocks.d_model, Rotary(blocks.d_model // blocks.heads)
        self.embed = nn.Linear(observed, d_model)
        self.stack = blocks.stack(DecoderBlock, position=position, mask=Window(history, 0))
        self.act, self.value = nn.Linear(d_model, actions), nn.Linear(d_model, 1)

    def forward(self, seen: Tensor, caches: Sequence[CacheLike] | None = None) -> tuple[Tensor, Tensor]:
        """Returns action logits and state values. With caches, `seen` has only new observations."""
        states = self.stack(self.embed(seen), caches=caches)
        return self.act(states), self.value(states).squeeze(-1)

    def weights(self, seen: Tensor) -> list[Tensor]:
        """Returns each layer's attention weights (heads, L, L) for observations (L, observed)."""
        return layer_weights(self.stack, self.embed(seen))
