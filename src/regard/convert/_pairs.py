"""The channels that rotary embeddings turn, in pairs, as complex numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..nn import Attention
from ..positions import Rotary


class Channels(NamedTuple):
    """The channels of a head: the first and second of each turning pair, and those that stay."""

    first: Tensor  # (pairs,)
    second: Tensor  # (pairs,)
    still: Tensor
    turns: Tensor  # (pairs,): radians for each step of position

    def complex(self, x: Tensor) -> Tensor:
        """(..., D, d) -> (..., pairs, d)"""
        return torch.complex(x[..., self.first, :], x[..., self.second, :])


def channels(module: Attention) -> Channels:
    rule, D = module.position, module.head_dim
    if not isinstance(rule, Rotary):
        nothing = torch.arange(0)
        return Channels(nothing, nothing, torch.arange(D), torch.zeros(0).double())
    half = rule.dims // 2
    if rule.layout == "half":
        first, second = torch.arange(half), torch.arange(half, 2 * half)
    else:
        first, second = torch.arange(0, 2 * half, 2), torch.arange(1, 2 * half, 2)
    return Channels(first, second, torch.arange(2 * half, D), rule.inv_freq.double().cpu())
