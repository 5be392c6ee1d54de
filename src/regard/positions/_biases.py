"""Positions as a bias of the scores. The modules hold what is learned and give a value of `regard.scores`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import scores
from .._tools.arguments import count


def alibi_slopes(heads: int) -> Tensor:
    """Returns the slopes (H,) of the ALiBi paper."""
    return scores.Alibi.standard(heads).slopes


class AlibiBias(nn.Module):
    """`-slope[h] * |pos - j|` for each head, slopes as in the paper; `learned` makes them a parameter."""

    slopes: Tensor

    def __init__(self, heads: int, *, learned: bool = False, device: Device = None) -> None:
        super().__init__()
        slopes = alibi_slopes(heads).to(device)
        if learned:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes, persistent=False)

    def forward(self) -> scores.Alibi:
        """The `bias` of `regard.attention`."""
        return scores.Alibi(self.slopes)

    def extra_repr(self) -> str:
        return f"{len(self.slopes)}, learned={isinstance(self.slopes, nn.Parameter)}"


class Relative(nn.Module):
    """T5's relative bias: a learned `table` (num_buckets, H), its rows chosen by the distance.

    `bidirectional` in an encoder, not in a decoder. T5 shares one such module among all layers of a stack.
    """

    def __init__(
        self, heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        size = (count("num_buckets", num_buckets, 2), count("heads", heads, 1))
        self.table = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self()  # refuses what cannot be
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def forward(self) -> scores.RelativeBias:
        """The `bias` of `regard.attention`."""
        both, far = self.bidirectional, self.max_distance
        return scores.RelativeBias(self.table, bidirectional=both, max_distance=far)

    def extra_repr(self) -> str:
        (buckets, heads), both = self.table.shape, self.bidirectional
        return f"{heads}, num_buckets={buckets}, max_distance={self.max_distance}, bidirectional={both}"
