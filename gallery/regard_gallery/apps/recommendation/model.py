"""SASRec (Kang and McAuley, 2018): a causal transformer that predicts a user's next item."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from regard.nn import DecoderBlock, PreNorm

from .._parts.blocks import Blocks

PADDING = 0


class SASRec(nn.Module):
    """Maps items (B, L), padded with 0 on the left, to next-item logits (B, L, items + 1).

    Positions count from the end, so that the latest item always has the same position embedding.
    """

    def __init__(self, items: int, length: int, d_model: int = 64, *, dropout: float = 0.3) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, d_model, padding_idx=PADDING)
        self.places = nn.Embedding(length, d_model)
        nn.init.normal_(self.items.weight, std=d_model**-0.5)
        nn.init.normal_(self.places.weight, std=d_model**-0.5)
        self.dropout = nn.Dropout(dropout)
        blocks = Blocks(d_model, heads=2, layers=2, hidden=2 * d_model, dropout=dropout)
        self.stack = blocks.stack(DecoderBlock, residual=partial(PreNorm, dropout=dropout))
        self.bias = nn.Parameter(torch.zeros(items + 1))

    def forward(self, seen: Tensor) -> Tensor:
        return self.score(self.states(seen))

    def states(self, seen: Tensor) -> Tensor:
        """Maps items (B, L) to states (B, L, d_model)."""
        L = seen.shape[1]
        x = self.dropout(self.items(seen) + self.places.weight[-L:])
        real = seen != PADDING
        out: Tensor = self.stack(x, mask=real[:, None, None])
        return out

    def score(self, states: Tensor) -> Tensor:
        """Maps states (..., d_model) to logits (..., items + 1), with the embeddings as weights."""
        return states @ self.items.weight.T + self.bias
