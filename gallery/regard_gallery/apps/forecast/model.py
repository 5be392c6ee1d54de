"""Forecasters of a time series from its past and from known future covariates."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import PreNorm

from .._parts.blocks import Blocks


class LinearForecaster(nn.Module):
    """Maps series (B, past + ahead, channels) to the next `ahead` values of channel 0, (B, ahead).

    Subtracts the mean from the past of channel 0 and decomposes the result into a moving average
    and the remainder, as in DLinear (Zeng et al., 2023). The forecast is the mean, plus a linear
    map of the moving average, a linear map of the remainder, and a linear map of the other
    channels, whose future is known.
    """

    def __init__(self, channels: int, past: int, ahead: int, *, window: int = 25) -> None:
        super().__init__()
        self.past, self.window = past, window
        self.slow, self.fast = nn.Linear(past, ahead), nn.Linear(past, ahead)
        self.known = nn.Linear((channels - 1) * (past + ahead), ahead)
        for linear in (self.slow, self.fast, self.known):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, series: Tensor) -> Tensor:
        past, known = series[:, : self.past, 0], series[:, :, 1:].flatten(1)
        mean = past.mean(1, keepdim=True)
        x = past - mean
        padded = F.pad(x[:, None], (self.window // 2, self.window // 2), mode="replicate")
        slow = F.avg_pool1d(padded, self.window, 1)[:, 0]
        out: Tensor = self.slow(slow) + self.fast(x - slow) + self.known(known) + mean
        return out


class PatchForecaster(nn.Module):
    """Adds a correction, computed by attention between patches, to a LinearForecaster's forecast.

    Inputs and outputs have the same shapes and meaning as in LinearForecaster. A token is a patch
    of `patch` time steps. Channel 0 is standardised by the mean and standard deviation of its past.
    The future of channel 0 is not read. The correction is 0 at initialisation.
    """

    def __init__(self, channels: int, past: int, ahead: int, *, patch: int = 8) -> None:
        super().__init__()
        d_model, dropout = 64, 0.2
        if past % patch or ahead % patch:
            raise ValueError(f"past, ahead: expected multiples of patch = {patch}, got {past}, {ahead}")
        self.past, self.ahead, self.patch = past, ahead, patch
        self.line = LinearForecaster(channels, past, ahead)
        self.embed = nn.Linear(channels * patch, d_model)
        self.places = nn.Parameter(0.02 * torch.randn((past + ahead) // patch, d_model))
        blocks = Blocks(d_model, layers=2, hidden=2 * d_model, dropout=dropout)
        self.stack = blocks.stack(residual=partial(PreNorm, dropout=dropout))
        self.out = nn.Linear(d_model, patch)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, series: Tensor) -> Tensor:
        past = series[:, : self.past, 0]
        mean, spread = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-6
        scaled = F.pad((past - mean) / spread, (0, self.ahead))
        x = torch.cat([scaled[..., None], series[..., 1:]], -1)
        tokens = self.embed(x.unflatten(1, (-1, self.patch)).flatten(2)) + self.places  # (B, tokens, d_model)
        change = self.out(self.stack(tokens)[:, -self.ahead // self.patch :]).flatten(1)  # (B, ahead)
        forecast: Tensor = self.line(series) + change * spread
        return forecast
