"""A small speech recogniser: an encoder trained with CTC, which needs no time labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.positions import Rotary

from .._parts.blocks import Blocks
from .._parts.looking import layer_weights

BLANK = 0
BLOCKS = Blocks(dropout=0.1)


class Recogniser(nn.Module):
    """Maps frames (B, L, features) and lengths (B,) to log-probabilities (B, L, 1 + symbols).

    Symbol 0 is CTC's blank. A convolution embeds each frame with its neighbours.
    """

    def __init__(self, features: int, symbols: int, blocks: Blocks = BLOCKS) -> None:
        super().__init__()
        self.near = nn.Conv1d(features, blocks.d_model, 5, padding=2)
        self.stack = blocks.stack(position=Rotary(blocks.d_model // blocks.heads))
        self.head = nn.Linear(blocks.d_model, 1 + symbols)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        states = self.stack(self._embedded(frames), lengths=lengths)
        return F.log_softmax(self.head(states), dim=-1)

    def _embedded(self, frames: Tensor) -> Tensor:
        return F.gelu(self.near(frames.transpose(1, 2))).transpose(1, 2)

    def weights(self, frames: Tensor) -> Tensor:
        """Returns the last layer's attention weights (L, L) for frames (L, features).

        The weights are averaged over the heads.
        """
        return layer_weights(self.stack, self._embedded(frames[None]))[-1][0].mean(0)


def ctc(log_probs: Tensor, lengths: Tensor, spoken: list[Tensor]) -> Tensor:
    """Returns the CTC loss of log-probabilities (B, L, 1 + symbols), given the spoken symbols."""
    counts = torch.tensor([*map(len, spoken)])
    by_frame = log_probs.transpose(0, 1)
    return F.ctc_loss(by_frame, torch.cat(spoken), lengths, counts, blank=BLANK, zero_infinity=True)


def greedy(log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
    """Returns the symbols of each sample by greedy CTC decoding.

    Takes the best symbol of each frame, merges repetitions and removes blanks.
    """
    decoded = []
    for best, length in zip(log_probs.argmax(-1), lengths.tolist(), strict=True):
        merged = best[:length].unique_consecutive()
        decoded.append(merged[merged != BLANK].tolist())
    return decoded
