"""A transformer over patches of a time series: the next values from the last ones and a known calendar."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..nn import EncoderBlock, PreNorm, Stack


class PatchForecaster(nn.Module):
    """Series (B, past + ahead, channels) -> the next `ahead` values of channel 0, (B, ahead).

    Each `patch` steps are a token. The tokens of the future hold what is known beforehand, the calendar; what
    is not must be 0 there. Channel 0 is scaled by its own past, and what is forecast is the difference to the
    value one `season` before.
    """

    def __init__(
        self,
        channels: int,
        past: int,
        ahead: int,
        *,
        season: int,
        patch: int = 4,
        d_model: int = 64,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        if past % patch or ahead % patch or not ahead <= season <= past:
            raise ValueError(
                f"past, ahead: expected multiples of {patch} around season = {season}, got {past}, {ahead}"
            )
        self.past, self.ahead, self.season, self.patch = past, ahead, season, patch
        self.embed = nn.Linear(channels * patch, d_model)
        self.places = nn.Parameter(0.02 * torch.randn((past + ahead) // patch, d_model))
        blocks = [
            EncoderBlock(
                d_model,
                heads,
                hidden=2 * d_model,
                residual=partial(PreNorm, dropout=dropout),
                dropout=dropout,
            )
            for _ in range(layers)
        ]
        self.stack = Stack(blocks, nn.LayerNorm(d_model))
        self.out = nn.Linear(d_model, patch)

    def forward(self, series: Tensor) -> Tensor:
        known = series[:, : self.past, 0]
        mean, spread = known.mean(1, keepdim=True), known.std(1, keepdim=True) + 1e-6
        scaled = (known - mean) / spread
        first = torch.nn.functional.pad(scaled, (0, self.ahead))
        x = torch.cat([first[..., None], series[..., 1:]], -1)
        tokens = self.embed(x.unflatten(1, (-1, self.patch)).flatten(2)) + self.places  # (B, tokens, d_model)
        change = self.out(self.stack(tokens)[:, -self.ahead // self.patch :]).flatten(1)  # (B, ahead)
        before = scaled[:, self.past - self.season :][:, : self.ahead]
        found: Tensor = (before + change) * spread + mean
        return found
