"""The loss of a model after a fixed number of steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._models import ByteModel, Sizes
from ._text import source_code

RATE, WARM = 3e-3, 0.1  # the highest rate of Adam, and the share of steps until then
LOOKED_AT = 64  # lines of the text that is held out


def trained(
    kind: str, sizes: Sizes, seed: int, steps: int, *, length: int = 128, batch: int = 8,
    progress: Callable[[], None] = lambda: None,
) -> float:  # fmt: skip
    """The loss on text that is held out, in nats for each byte.

    All kinds meet the same batches in the same order, which the seed decides, as it does the first weights.
    """
    torch.manual_seed(seed)
    model = ByteModel(kind, sizes)
    train, others = source_code(length + 1)
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
        chosen = others[:: max(len(others) // LOOKED_AT, 1)]
        losses = [_loss(model, lines) * len(lines) for lines in chosen.split(batch)]
    return float(torch.stack(losses).sum() / len(chosen))


def _loss(model: ByteModel, lines: Tensor) -> Tensor:
    return F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())


def _share(step: int, steps: int) -> float:
    """Of the highest rate: up in a line, and down to zero."""
    warm = max(1, round(WARM * steps))
    return (step + 1) / warm if step < warm else (steps - step) / max(1, steps - warm)
