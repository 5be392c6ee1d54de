"""A causal transformer over what a user has seen: which item comes next (SASRec, Kang and McAuley, 2018)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from regard.nn import DecoderBlock, PreNorm, Stack

PADDING = 0


class SASRec(nn.Module):
    """Items (B, L), 0 in front where there are fewer -> scores of each as the next one, (B, L, items + 1).

    Places are counted from the end, so that the latest item is always at the same one.
    """

    def __init__(
        self,
        items: int,
        length: int,
        d_model: int = 64,
        *,
        heads: int = 2,
        layers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, d_model, padding_idx=PADDING)
        self.places = nn.Embedding(length, d_model)
        nn.init.normal_(self.items.weight, std=d_model**-0.5)
        nn.init.normal_(self.places.weight, std=d_model**-0.5)
        self.dropout = nn.Dropout(dropout)
        residual = partial(PreNorm, dropout=dropout)
        blocks = [
            DecoderBlock(d_model, heads, hidden=2 * d_model, residual=residual, dropout=dropout)
            for _ in range(layers)
        ]
        self.stack = Stack(blocks, nn.LayerNorm(d_model))
        self.bias = nn.Parameter(torch.zeros(items + 1))

    def forward(self, seen: Tensor) -> Tensor:
        return self.score(self.states(seen))

    def states(self, seen: Tensor) -> Tensor:
        """(B, L, d_model)"""
        L = seen.shape[1]
        x = self.dropout(self.items(seen) + self.places.weight[-L:])
        real = seen != PADDING
        out: Tensor = self.stack(x, mask=real[:, None, None])
        return out

    def score(self, states: Tensor) -> Tensor:
        """(..., d_model) -> (..., items + 1), by the items' own vectors."""
        return states @ self.items.weight.T + self.bias
