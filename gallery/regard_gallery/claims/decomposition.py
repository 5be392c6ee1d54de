"""Claim: the decomposition into heads lowers the difficulty of learning. `regard claims decomposition`

The experiment trains models that differ only in the number of heads: 1, 2, 4 or 8 heads of the same
total width, with the same number of parameters, the same initial weights and the same batches. It
has two tasks. In the first, a language model of two blocks learns source code. In the second, a
layer of cross-attention must recall the value that belongs to a key, among 32 pairs. There are 64
different keys, and a head of 4 channels (8 heads) has less room to tell keys apart than a head of
32 channels. The difficulty is the mean of the loss over all training steps, the area under the
learning curve. It is compared with that of one head, seed by seed. A difference of at most two
standard errors decides nothing. The experiment takes about 30 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.masks import Causal
from regard.nn import Attention, CrossAttention
from regard.positions import Rotary

from .finding import Finding
from .training import language_model, sign, standard_error, texts, trained

HEADS = 1, 2, 4, 8
WORDS = {1: "harder", -1: "easier", 0: "undecided"}


def text(heads: int, seed: int, steps: int) -> float:
    """Trains a language model of width 64 on source code. Returns the mean loss over all steps."""
    torch.manual_seed(seed)
    options = {"position": Rotary(64 // heads), "mask": Causal()}
    model = language_model([Attention(64, heads, **options) for _ in range(2)], 64)  # type: ignore[arg-type]
    batches = texts(seed, length=64, batch=8)

    def loss() -> Tensor:
        x, y = next(batches)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return mean(trained(model, loss, steps, 3e-3))


class Recall(nn.Module):
    """Finds the value of each key: keys and values (B, n) -> logits (B, n, kinds)."""

    def __init__(self, heads: int, kinds: int, width: int) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(kinds, width), nn.Embedding(kinds, width)
        self.attend = CrossAttention(width, heads=heads, kv_model=width)
        self.name = nn.Linear(width, kinds)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        out: Tensor = self.name(self.attend(self.key(keys), self.key(keys) + self.value(values)))
        return out


def recall(heads: int, seed: int, steps: int, kinds: int = 64, pairs: int = 32) -> float:
    """Trains a layer of width 32 on pairs of keys and values. Returns the mean loss over all steps."""
    torch.manual_seed(seed)
    model = Recall(heads, kinds, 32)

    def loss() -> Tensor:
        keys, values = torch.rand(32, kinds).argsort(1)[:, :pairs], torch.randint(kinds, (32, pairs))
        return F.cross_entropy(model(keys, values).flatten(0, 1), values.flatten())

    return mean(trained(model, loss, steps, 1e-2))


TASKS: dict[str, Callable[[int, int, int], float]] = {"text": text, "recall": recall}


def compared(losses: Mapping[int, list[float]]) -> dict[int, list[float]]:
    """Returns the differences of the losses from those of one head, seed by seed."""
    return {
        heads: [ours - one for ours, one in zip(found, losses[1], strict=True)]
        for heads, found in losses.items()
        if heads > 1
    }


def judge(signs: list[int]) -> str:
    """Returns the verdict from the sign of each difference: -1 is a lower loss than with one head."""
    if 1 in signs:
        return "incomplete" if -1 in signs else "wrong"
    return "undecided" if 0 in signs else "right"


def measure(steps: Mapping[str, int] | None = None, seeds: int = 4) -> Finding:
    steps = steps or {"text": 250, "recall": 100}
    losses = {
        name: {heads: [TASKS[name](heads, seed, count) for seed in range(seeds)] for heads in HEADS}
        for name, count in steps.items()
    }
    leads = {name: compared(found) for name, found in losses.items()}
    signs = {name: {heads: sign(found) for heads, found in lead.items()} for name, lead in leads.items()}
    return Finding(
        claim="the decomposition into heads lowers the difficulty of learning",
        verdict=judge([s for found in signs.values() for s in found.values()]),
        measured=f"mean loss of {seeds} learning curves with {' / '.join(map(str, HEADS))} heads: "
        + "; ".join(
            f"{name} {' / '.join(f'{mean(found):.3f}' for found in by_heads.values())}"
            for name, by_heads in losses.items()
        ),
        correct="depends on the task. "
        + ". ".join(f"{name.capitalize()}: {outcomes(found, leads[name])}" for name, found in signs.items())
        + ". Several heads read several positions at once, but each has fewer channels to find one",
        numbers={
            "mean loss by task, heads and seed": named(losses),
            "loss minus that of one head": named(leads),
            "task by number of heads": {
                name: {str(heads): WORDS[s] for heads, s in found.items()} for name, found in signs.items()
            },
        },
    )


def outcomes(signs: Mapping[int, int], leads: Mapping[int, list[float]]) -> str:
    return ", ".join(
        f"{WORDS[s]} with {heads} heads ({mean(leads[heads]):+.3f} ± {standard_error(leads[heads]):.3f})"
        for heads, s in signs.items()
    )


def named(found: Mapping[str, Mapping[int, list[float]]]) -> dict[str, dict[str, list[float]]]:
    return {name: {str(heads): x for heads, x in by_heads.items()} for name, by_heads in found.items()}
