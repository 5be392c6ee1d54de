"""A simple cache, a causal mask and random weights for module tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard import masks as M


def randomized(module: Any, std: float = 0.2) -> Any:
    """Redraws all parameters of a module, biases included."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def causal_mask(n: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


class ListCache:
    """A minimal cache with the interface that modules use: appends tokens and attends causally."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths, self.k, self.v, self.options = lengths, [], [], {}  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return int(self.lengths.max())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
        self.k.append(k)
        self.v.append(v)
        self.lengths = self.lengths + k.shape[2]
        mask = M.Causal() if mask is None else M.Causal() & mask
        return regard.attention(q, torch.cat(self.k, 2), torch.cat(self.v, 2), mask=mask, **options)
