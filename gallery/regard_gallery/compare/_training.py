"""Trains a model for a fixed number of steps and measures its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._models import ByteModel, Sizes
from ._text import source_code

RATE, WARM = 3e-3, 0.1  # Adam's peak learning rate; share of the steps in which it rises
EVALUATED = 64  # number of held-out sequences on which the loss is measured


def trained(
    kind: str, sizes: Sizes, seed: int, steps: int, *, length: int = 128, batch: int = 8,
    progress: Callable[[], None] = lambda: None,
) -> float:  # fmt: skip
    """Trains a model and returns its held-out loss in nats per byte.

    The seed determines the initial weights and the batches. With the same seed, all kinds of
    attention train on the same batches.
    """
    torch.manual_seed(seed)
    model = ByteModel(kind, sizes)
    train, held_out = source_code(length + 1)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model, train[torch.randint(len(train), (batch,), generator=order)]).backward()
        optimizer.step()
        schedule.step()
        progress()
    with torch.no_grad():
        chosen = held_out[:: max(len(held_out) // EVALUATED, 1)]
        losses = [_loss(model, sequences) * len(sequences) for sequences in chosen.split(batch)]
    return float(torch.stack(losses).sum() / len(chosen))


def _loss(model: ByteModel, sequences: Tensor) -> Tensor:
    return F.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


def _share(step: int, steps: int) -> float:
    """Returns the learning rate of a step as a fraction of the highest learning rate.

    The rate rises linearly in the warmup, then decays linearly to zero.
    """
    warm = max(1, round(WARM * steps))
    return (step + 1) / warm if step < warm else (steps - step) / max(1, steps - warm)
