"""A small speech recogniser: an encoder trained by CTC, so that nobody need say when each word was spoken."""

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
    """Frames (B, L, features), of which the first n of each are real -> log-chances (B, L, 1 + symbols).

    The first symbol is CTC's blank. A convolution sees the frames around, attention the whole recording.
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
        """What the last layer attends to in one recording (L, features), mean of the heads: (L, L)."""
        return layer_weights(self.stack, self._embedded(frames[None]))[-1][0].mean(0)


def ctc(log_chances: Tensor, lengths: Tensor, spoken: list[Tensor]) -> Tensor:
    """The loss: minus the log of the chance of all ways to write what was spoken, symbols from 1 on."""
    counts = torch.tensor([len(own) for own in spoken])
    by_frame = log_chances.transpose(0, 1)
    return F.ctc_loss(by_frame, torch.cat(spoken), lengths, counts, blank=BLANK, zero_infinity=True)


def greedy(log_chances: Tensor, lengths: Tensor) -> list[list[int]]:
    """The best symbol of each frame, repetitions joined, blanks left out."""
    found = []
    for best, length in zip(log_chances.argmax(-1), lengths.tolist(), strict=True):
        joined = best[:length].unique_consecutive()
        found.append(joined[joined != BLANK].tolist())
    return found
