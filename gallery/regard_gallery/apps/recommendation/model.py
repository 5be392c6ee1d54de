"""A causal transformer over what a user has seen: which item comes next (SASRec, Kang and McAuley, 2018)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from regard.nn import DecoderBlock, PreNorm

from .._parts.blocks import Blocks

PADDING = 0


class SASRec(nn.Module):
    """Items (B, L), 0 in front where there are fewer -> scores of each as the next one, (B, L, items + 1).

    Places are counted from the end, so that the latest item is always at the same one.
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
        """(B, L, d_model)"""
        L = seen.shape[1]
        x = self.dropout(self.items(seen) + self.places.weight[-L:])
        real = seen != PADDING
        out: Tensor = self.stack(x, mask=real[:, None, None])
        return out

    def score(self, states: Tensor) -> Tensor:
        """(..., d_model) -> (..., items + 1), by the items' own vectors."""
        return states @ self.items.weight.T + self.bias
