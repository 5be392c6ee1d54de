"""Modules for position biases. They hold the parameters and return biases of `regard.scores`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import scores
from .._tools.arguments import count


def alibi_slopes(heads: int) -> Tensor:
    """Returns the slopes (H,) of the ALiBi paper, float32."""
    return scores.Alibi.standard(heads).slopes


class AlibiBias(nn.Module):
    """A module that returns an ALiBi bias, `-slopes[h] * |pos - j|`, with the slopes of the paper.

    h is the head, pos the position of the query, and j the position of the key.

    Args:
        heads: Hq.
        learned: whether the slopes (Hq,) are a parameter.
        device: the device of the slopes.

    Example:
        >>> bias = positions.AlibiBias(8)
        >>> out = regard.attention(q, k, v, mask=masks.Causal(), bias=bias())
    """

    slopes: Tensor

    def __init__(self, heads: int, *, learned: bool = False, device: Device = None) -> None:
        super().__init__()
        slopes = alibi_slopes(heads).to(device)
        if learned:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes, persistent=False)

    def forward(self) -> scores.Alibi:
        """Returns the bias, to be passed to `regard.attention` as `bias`."""
        return scores.Alibi(self.slopes)

    def extra_repr(self) -> str:
        return f"{len(self.slopes)}, learned={isinstance(self.slopes, nn.Parameter)}"


class Relative(nn.Module):
    """A module that returns the relative position bias of T5.

    In T5, all layers of the encoder share one such module, and all layers of the decoder another.

    Args:
        heads: Hq.
        num_buckets: number of rows of the learned `table` (num_buckets, Hq).
        max_distance: all distances >= max_distance share the last bucket. If bidirectional, each
            direction has its own last bucket.
        bidirectional: True for an encoder, False for a decoder.
        device, dtype: device and dtype of the table.
    """

    def __init__(
        self, heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        size = (count("num_buckets", num_buckets, 2), count("heads", heads, 1))
        self.table = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self()  # raises if the sizes are invalid
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def forward(self) -> scores.RelativeBias:
        """Returns the bias, to be passed to `regard.attention` as `bias`."""
        both, far = self.bidirectional, self.max_distance
        return scores.RelativeBias(self.table, bidirectional=both, max_distance=far)

    def extra_repr(self) -> str:
        (buckets, heads), both = self.table.shape, self.bidirectional
        return f"{heads}, num_buckets={buckets}, max_distance={self.max_distance}, bidirectional={both}"
