"""Training loops and a small language model, which several experiments share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import mean, stdev

import torch
from torch import Tensor, nn

from regard.nn import Attention, Block, FeedForward, PreNorm, Stack

from ..compare._text import source_code


def trained(model: nn.Module, loss_of: Callable[[], Tensor], steps: int, rate: float) -> list[float]:
    """Trains a model with Adam and returns the loss of each step. The rate falls linearly to 0.

    `loss_of` draws a batch and returns its loss. Each batch is new, so the loss of a step is that
    of samples which the model has not been trained on. Training ends at a loss that is not finite.
    """
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses: list[float] = []
    while len(losses) < steps and all(map(math.isfinite, losses[-1:])):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def texts(seed: int, length: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields random batches of source code: bytes (batch, length) and the byte after each of them."""
    sequences, _ = source_code(length + 1)
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = sequences[torch.randint(len(sequences), (batch,), generator=generator)]
        yield chosen[:, :-1], chosen[:, 1:]


def language_model(attentions: Iterable[Attention], width: int, norms: bool = True) -> nn.Module:
    """Returns a model with one block per attention layer, which maps bytes (B, L) to (B, L, 256)."""
    residual = PreNorm if norms else partial(PreNorm, norm=nn.Identity)
    blocks = [Block(layer, FeedForward(width, 2 * width), residual=residual) for layer in attentions]
    stack = Stack(blocks, nn.LayerNorm(width) if norms else None)
    return nn.Sequential(nn.Embedding(256, width), stack, nn.Linear(width, 256))


def standard_error(values: list[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def sign(differences: list[float]) -> int:
    """Returns the sign of the mean, or 0 if the mean is within two standard errors of 0."""
    middle = mean(differences)
    if abs(middle) <= 2 * standard_error(differences):
        return 0
    return 1 if middle > 0 else -1
