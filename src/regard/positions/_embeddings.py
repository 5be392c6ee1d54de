"""Position embeddings that are added to the tokens: sinusoidal or learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .._tools.arguments import count, describe, readable
from ._frequencies import frequencies
from ._positions import Positions, position_tensor
from ._rotary import rotary_table


def sinusoidal(positions: Tensor, d_model: int, *, base: float = 10000.0) -> Tensor:
    """Returns sinusoidal embeddings (..., L, d_model) float32 of integer positions (..., L).

    Channel 2i is `sin(position * base ** (-2i / d_model))`, channel 2i + 1 is the cosine, as in
    "Attention is all you need".
    """
    cos, sin = rotary_table(positions, frequencies(d_model, base)[0])
    return torch.stack((sin, cos), -1).flatten(-2)


def _token_positions(x: Tensor, d_model: int, positions: Positions) -> Tensor:
    """Checks x (..., L, d_model) and returns the position of each token."""
    if x.dim() < 2 or x.shape[-1] != d_model:
        raise ValueError(f"x: expected (..., L, d_model = {d_model}), got {describe(x)}")
    return position_tensor(positions, x.shape[-2], x.device)


class Sinusoidal(nn.Module):
    """A module that adds sinusoidal embeddings to x (..., L, d_model). It has no parameters.

    Args:
        d_model: number of channels, even.
        base: as in `sinusoidal`. The longest wavelength is about 2 pi * base positions.
    """

    def __init__(self, d_model: int, *, base: float = 10000.0) -> None:
        super().__init__()
        frequencies(d_model, base)  # raises if d_model or base is invalid
        self.d_model, self.base = d_model, base

    def forward(self, x: Tensor, positions: Positions = 0) -> Tensor:
        """Returns x plus the embeddings.

        `positions` is the position of the first token, or integers (L,) or (B, L).
        """
        at = _token_positions(x, self.d_model, positions)
        return x + sinusoidal(at, self.d_model, base=self.base).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d_model}, base={self.base:g}"


class Learned(nn.Module):
    """A module that adds learned embeddings to x (..., L, d_model).

    Args:
        length: number of positions, which is the number of rows of the parameter `weight` (length,
            d_model).
        d_model: number of channels.
        device, dtype: device and dtype of the parameter.
    """

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
        """Returns x plus the embeddings. Raises ValueError if a position is not in [0, length)."""
        at = _token_positions(x, self.weight.shape[1], positions)
        if at.numel() and readable(at):
            first, last, end = int(at.min()), int(at.max()), len(self.weight) - 1
            if first < 0 or last > end:
                raise ValueError(f"positions: expected 0 to {end}, got {first} to {last}")
        return x + nn.functional.embedding(at, self.weight)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, {self.weight.shape[1]}"
