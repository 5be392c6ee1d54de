"""Claim: the time-series sample forecasts from the past of a series. `regard claims time_series`

The sample has two faults, and neither raises. Without `batch_first=True`, PyTorch's encoder takes
the batch (B, L, d) as B steps of L series, so that a forecast depends on the other series of the
batch at the same step, and not on its own past. With `batch_first=True`, the past counts, but not
its order: the sample adds no positions, and attention without positions sees a set.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .finding import Finding, verdict


class Forecaster(nn.Module):
    """The sample: a projection of the features, six layers, a projection back to the features."""

    def __init__(self, channels: int, d: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(channels, d), nn.Linear(d, channels)
        layer = nn.TransformerEncoderLayer(d, heads, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        forecast: Tensor = self.output(self.encoder(self.input(x)))
        return forecast


@torch.no_grad()
def influences(d: int, heads: int, batch_first: bool) -> tuple[float, float, float]:
    """Returns how much three changes of the input change the last output of series 0.

    The changes are: other values of the other series, other values in the own past, and another
    order of the own past.
    """
    torch.manual_seed(0)
    model = Forecaster(3, d, heads, batch_first).eval()
    x = torch.randn(4, 9, 3)
    others, past, order = x.clone(), x.clone(), x.clone()
    others[1:] += 1
    past[0, :-1] += 1
    order[0, :-1] = x[0, :-1].flip(0)
    before = model(x)[0, -1]
    other, own, permuted = (float((model(y)[0, -1] - before).abs().max()) for y in (others, past, order))
    return other, own, permuted


def measure(d: int = 512, heads: int = 8) -> Finding:
    printed, mended = influences(d, heads, False), influences(d, heads, True)
    own_past = printed[0] < 1e-5 < printed[1]
    return Finding(
        claim="the time-series sample forecasts from the past of a series",
        verdict=verdict(own_past and printed[2] > 1e-5, "incomplete" if own_past else "wrong"),
        measured=f"other series of the batch change a forecast by {printed[0]:.2f}, the series' own past by "
        f"{printed[1]:g}; with `batch_first=True`, the order of the past changes it by {mended[2]:.0e}",
        correct=f"with `batch_first=True`, other series change a forecast by {mended[0]:.1g}, and the own "
        f"past by {mended[1]:.2f}; for the order to count, positions must be added",
        numbers={
            f"change by {name}, {kind}": value
            for kind, values in (("printed", printed), ("batch_first", mended))
            for name, value in zip(("other series", "own past", "order of own past"), values, strict=True)
        },
    )
