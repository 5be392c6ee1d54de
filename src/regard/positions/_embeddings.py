"""Positions that are added to the tokens: waves of fixed lengths, or a learned table."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .._tools.arguments import count, describe, readable
from ._frequencies import frequencies
from ._places import Positions, places


def sinusoidal(positions: Tensor, d_model: int, *, base: float = 10000.0) -> Tensor:
    """The waves of "Attention is all you need": integers (..., L) -> (..., L, d_model) float32.

    Channel 2i is `sin(position * base ** (-2i / d_model))`, channel 2i + 1 the cosine.
    """
    turns, _ = frequencies(d_model, base)
    angles = positions[..., None].float() * turns.to(positions.device)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


def _places(x: Tensor, d_model: int, positions: Positions) -> Tensor:
    """Returns the place of each token of x (..., L, d_model)."""
    if x.dim() < 2 or x.shape[-1] != d_model:
        raise ValueError(f"x: expected (..., L, d_model = {d_model}), got {describe(x)}")
    return places(positions, x.shape[-2], x.device)


class Sinusoidal(nn.Module):
    """x (..., L, d_model) plus the waves of its places. No parameters, any length."""

    def __init__(self, d_model: int, *, base: float = 10000.0) -> None:
        super().__init__()
        frequencies(d_model, base)  # refuses what cannot be
        self.d_model, self.base = d_model, base

    def forward(self, x: Tensor, positions: Positions = 0) -> Tensor:
        """Positions: an int, the place of the first token, or the place of every one, (L,) or (B, L)."""
        at = _places(x, self.d_model, positions)
        return x + sinusoidal(at, self.d_model, base=self.base).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d_model}, base={self.base:g}"


class Learned(nn.Module):
    """x (..., L, d_model) plus a learned row of `weight` (length, d_model) for each place."""

    def __init__(
        self, length: int, d_model: int, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        size = (count("length", length, 1), count("d_model", d_model, 1))
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, positions: Positions = 0) -> Tensor:
        """Positions as in `Sinusoidal`; a place beyond the table raises."""
        at = _places(x, self.weight.shape[1], positions)
        if at.numel() and readable(at):
            first, last, end = int(at.min()), int(at.max()), len(self.weight) - 1
            if first < 0 or last > end:
                raise ValueError(f"positions: expected places from 0 to {end}, got {first} to {last}")
        return x + nn.functional.embedding(at, self.weight)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, {self.weight.shape[1]}"
