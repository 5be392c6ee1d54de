"""The argument `positions`: the position of the first token, or a tensor with every position."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tools.arguments import as_int, describe, holds_integers, is_integer

Positions = int | Tensor


def position_tensor(positions: Positions, L: int, device: torch.device) -> Tensor:
    """Returns the position of each token: integers (L,), or the tensor `positions` (..., L)."""
    if isinstance(positions, Tensor):
        if not holds_integers(positions) or positions.ndim < 1 or positions.shape[-1] != L:
            expected = f"an int or integers of shape (..., L) with L = {L}"
            raise ValueError(f"positions: expected {expected}, got {describe(positions)}")
        return positions.to(device)
    if not is_integer(positions):
        raise TypeError(f"positions: expected an int or an integer tensor, got {describe(positions)}")
    start = as_int(positions)
    return torch.arange(start, start + L, device=device)
