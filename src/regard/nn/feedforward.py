"""Feed-forward layers of a transformer block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from .._api.projection import Linear
from ._sizes import Run, rows

if TYPE_CHECKING:
    from ..distributed._share import LayerShare

Activation = Callable[[Tensor], Tensor]


class HiddenLayer(nn.Module):
    """A layer with hidden channels, whose output projection is `down`."""

    down: nn.Linear
    _share: LayerShare | None = None  # with tensor parallelism

    @property
    def _units(self) -> tuple[int, int]:
        return self.down.in_features, self.down.in_features

    def _rows(self, hidden: Run, _: Run) -> dict[str, list[Run]]:
        """Returns the rows of each projection for some hidden channels, and the columns of `down`."""
        return {"up": [hidden], "gate_up": [hidden, rows(hidden, 1, self.down.in_features)], "down": [hidden]}


class FeedForward(HiddenLayer):
    """A feed-forward layer, down(dropout(activation(up(x)))): (..., d_model) -> (..., d_model).

    Args:
        d_model: width of the input and of the output.
        hidden: width of the hidden layer. Default: 4 * d_model.
        activation: a function of a tensor. Default: GELU.
        dropout: dropout probability of the hidden layer in training.
        bias: if True, `up` and `down` have biases.
    """

    def __init__(
        self, d_model: int, hidden: int | None = None, *, activation: Activation = F.gelu,
        dropout: float = 0.0, bias: bool = True, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = 4 * d_model if hidden is None else hidden
        self.up = Linear(d_model, hidden, bias, device, dtype)
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.down = Linear(hidden, d_model, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to x (..., d_model). The output has x's shape."""
        out: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return out


class GatedFeedForward(HiddenLayer):
    """A gated feed-forward layer, down(dropout(activation(gate(x)) * up(x))).

    Maps (..., d_model) to (..., d_model). With SiLU as activation, the layer is SwiGLU. With GELU,
    it is GEGLU. One linear layer, `gate_up`, computes `gate` and `up`: its weight holds the rows of
    `gate`, followed by the rows of `up`.

    Args:
        d_model: width of the input and of the output.
        hidden: width of the hidden layer. Default: 8/3 * d_model, rounded up to a multiple of 8,
            which gives about as many parameters as `FeedForward` has.
        activation: a function of a tensor. Default: SiLU.
        dropout: dropout probability of the hidden layer in training.
        bias: if True, `gate_up` and `down` have biases.
    """

    def __init__(
        self, d_model: int, hidden: int | None = None, *, activation: Activation = F.silu,
        dropout: float = 0.0, bias: bool = False, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = -(-d_model // 3) * 8 if hidden is None else hidden
        self.gate_up = Linear(d_model, 2 * hidden, bias, device, dtype)
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.down = Linear(hidden, d_model, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to x (..., d_model). The output has x's shape."""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(self.dropout(self.activation(gate) * up))
        return out


def SwiGLU(
    d_model: int, hidden: int | None = None, *, dropout: float = 0.0, bias: bool = False
) -> GatedFeedForward:
    """Returns the gated feed-forward layer of Llama: a `GatedFeedForward` with SiLU."""
    return GatedFeedForward(d_model, hidden, dropout=dropout, bias=bias)
