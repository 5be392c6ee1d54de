"""The feed-forward layer of a block: plain, or gated."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """down(dropout(activation(up(x)))), by default four times as wide inside."""

    def __init__(
        self, d_model: int, hidden: int | None = None, *, activation: Activation = F.gelu,
        dropout: float = 0.0, bias: bool = True, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = 4 * d_model if hidden is None else hidden
        self.up = nn.Linear(d_model, hidden, bias, device, dtype)
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.down = nn.Linear(hidden, d_model, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> the same shape."""
        out: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return out


class GatedFeedForward(nn.Module):
    """down(dropout(activation(gate(x)) * up(x))): SwiGLU with SiLU, GEGLU with GELU.

    `gate_up` holds both matrices, the gate first. By default 8/3 as wide inside, rounded up to a multiple of
    8, so that there are about as many parameters as in `FeedForward`.
    """

    def __init__(
        self, d_model: int, hidden: int | None = None, *, activation: Activation = F.silu,
        dropout: float = 0.0, bias: bool = False, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = -(-d_model // 3) * 8 if hidden is None else hidden
        self.gate_up = nn.Linear(d_model, 2 * hidden, bias, device, dtype)
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.down = nn.Linear(hidden, d_model, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> the same shape."""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(self.dropout(self.activation(gate) * up))
        return out


def SwiGLU(
    d_model: int, hidden: int | None = None, *, dropout: float = 0.0, bias: bool = False
) -> GatedFeedForward:
    """The gated feed-forward layer of Llama."""
    return GatedFeedForward(d_model, hidden, dropout=dropout, bias=bias)
