"""The table of MHA, GQA, MQA and MLA. `python docs/claims/comparison.py` takes about two minutes

The notes say     parameters  memory    inference  quality
    MHA           high        high      slow       high
    GQA           medium      medium    medium     high
    MQA           low         low       fast       medium
    MLA           low         very low  fast       high

Measured at equal width: parameters of a layer, bytes that its cache keeps for each token, tokens in a
second through a small model (`examples/compare_heads.py`), and the loss of a smaller one on source code
that it was not trained on.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from itertools import permutations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from finding import Finding, verdict
from torch import Tensor

from regard.nn import Attention, LatentAttention

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
from compare_heads import Model, Side, attention

KINDS = "MHA", "GQA-4", "MQA", "MLA"
# The words of the notes as ranks; for quality and speed more is better.
NOTES = {
    "parameters": (3, 2, 1, 1),
    "bytes": (4, 3, 2, 1),
    "tokens / s": (1, 2, 3, 3),
    "quality": (2, 2, 1, 2),
}
WIDTH, HEADS = 512, 8


def sizes(layers: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        "parameters": {kind: sum(p.numel() for p in layer.parameters()) for kind, layer in layers.items()},
        "bytes": {kind: layer.new_cache(1, 64).nbytes // 64 for kind, layer in layers.items()},
    }


def large() -> dict[str, Any]:
    """Layers of DeepSeek-V2's sizes, without memory."""
    options: dict[str, Any] = {"bias": False, "device": "meta"}
    groups = {"MHA": 128, "GQA-4": 4, "MQA": 1}
    latent = LatentAttention(5120, 128, rank=512, nope_dim=128, rope_dim=64, q_rank=1536, **options)
    grouped = {kind: Attention(5120, 128, kv_heads=n, head_dim=128, **options) for kind, n in groups.items()}
    return {**grouped, "MLA": latent}


@torch.no_grad()
def speeds(tokens: int, rounds: int) -> dict[str, float]:
    """Tokens in a second with so many in the caches. The models take turns."""
    options = Namespace(width=WIDTH, heads=HEADS, layers=2, steps=8)
    text = torch.randint(256, (1, tokens + options.steps), generator=torch.Generator().manual_seed(1))
    prompt, new = text.split((tokens, options.steps), 1)
    sides = [Side(kind, prompt, options) for kind in KINDS]
    for _ in range(rounds):
        for side in sides:
            side.decode(new)
    return {side.kind: 1 / side.best for side in sides}


@cache
def source_code(length: int) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library in lines of `length`: to train on, and others."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
    lines = text[: len(text) // length * length].view(-1, length).long()
    return lines[: -len(lines) // 10], lines[-len(lines) // 10 :]


def loss(model: Model, lines: Tensor) -> Tensor:
    return F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())


def trained(kind: str, seed: int, steps: int) -> float:
    """The loss in nats for each byte after so many steps."""
    torch.manual_seed(seed)
    model = Model([attention(kind, 64, HEADS) for _ in range(2)], 64)
    train, others = source_code(129)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, train[torch.randint(len(train), (8,))]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(model, others[:: max(len(others) // 64, 1)]))


def denied(words: tuple[int, ...], values: Mapping[str, float], margin: float = 0.0) -> list[str]:
    """Pairs that the notes put in an order which the values do not show."""
    ranks = dict(zip(KINDS, words, strict=True))
    return [
        f"{low} < {high}"
        for low, high in permutations(KINDS, 2)
        if ranks[low] < ranks[high] and not values[low] + margin < values[high]
    ]


def relative(column: Mapping[str, float]) -> str:
    """Beside MHA."""
    return " / ".join(f"{column[kind] / column['MHA']:.3g}" for kind in KINDS)


def measure(tokens: int = 2048, rounds: int = 5, steps: int = 200, seeds: int = 3) -> Finding:
    losses = {kind: [trained(kind, seed, steps) for seed in range(seeds)] for kind in KINDS}
    columns = {
        **sizes({kind: attention(kind, WIDTH, HEADS) for kind in KINDS}),
        "tokens / s": speeds(tokens, rounds),
        "quality": {kind: -mean(found) for kind, found in losses.items()},
    }
    margins = {
        "tokens / s": 0.05 * columns["tokens / s"]["MHA"],
        "quality": max(stdev(found) for found in losses.values()),
    }
    against = {name: denied(NOTES[name], columns[name], margins.get(name, 0.0)) for name in NOTES}
    loss_text = " / ".join(f"{mean(losses[kind]):.2f}" for kind in KINDS)
    at_large = sizes(large())
    return Finding(
        claim="the table of MHA / GQA / MQA / MLA: parameters, memory, inference, quality",
        verdict=verdict(not any(against.values())),
        measured="; ".join(
            f"{name} {relative(columns[name])}" for name in ("parameters", "bytes", "tokens / s")
        )
        + f"; loss {loss_text}, seeds scatter by {margins['quality']:.2f}",
        correct="not there: "
        + "; ".join(f"{name} {', '.join(pairs)}" for name, pairs in against.items() if pairs)
        + f". At DeepSeek-V2's sizes: parameters {relative(at_large['parameters'])}, "
        f"bytes {relative(at_large['bytes'])}",
        numbers={
            **{name: values for name, values in columns.items() if name != "quality"},
            "loss by seed": losses,
            "orders that are not there": against,
            **{f"{name} at DeepSeek-V2's sizes": values for name, values in at_large.items()},
        },
    )


if __name__ == "__main__":
    print(measure())
