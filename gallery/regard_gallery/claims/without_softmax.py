"""Claim: without softmax values explode, and training is unstable. `regard claims without_softmax`

The experiment trains small language models on source code (two blocks of width 64, bytes, Adam).
They differ only in the weights of attention: softmax; the raw scores q.k / sqrt(d_k); the raw
scores divided by the number of keys; the raw scores divided by the sum of their absolute values.
Each model is trained with several seeds, without normalisation layers and with a LayerNorm before
each sublayer. Values explode if the largest output of a head is over ten times as large as with
softmax, for every seed. A run is unstable if its loss rises above that of a model that gives all
256 bytes the same probability, after ten steps. If fewer than half of the runs with raw scores are
unstable, their number does not decide. The experiment takes about 20 seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn import Attention
from regard.positions import Rotary

from .finding import Finding
from .training import language_model, sign, texts, trained

WIDTH, HEADS, LENGTH, BATCH, RATE = 64, 4, 64, 8, 3e-3
FIRST = 10  # steps before which a high loss is normal
UNIFORM = math.log(256)


def softmax(scores: Tensor, past: Tensor) -> Tensor:
    return scores.masked_fill(~past, -torch.inf).softmax(-1)


def raw(scores: Tensor, past: Tensor) -> Tensor:
    return scores.masked_fill(~past, 0)


def by_count(scores: Tensor, past: Tensor) -> Tensor:
    return raw(scores, past) / past.sum(-1, keepdim=True)


def by_sum(scores: Tensor, past: Tensor) -> Tensor:
    weights = raw(scores, past)
    return weights / (weights.abs().sum(-1, keepdim=True) + 1e-6)


Rule = Callable[[Tensor, Tensor], Tensor]
RULES: dict[str, Rule] = {
    "softmax": softmax,
    "raw": raw,
    "divided by count": by_count,
    "divided by sum": by_sum,
}
OTHERS = ("divided by count", "divided by sum")


class Weighted(Attention):
    """Causal attention whose weights are a function of the scores. Keeps the largest output."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(WIDTH, HEADS, position=Rotary(WIDTH // HEADS))
        self.rule, self.largest = rule, 0.0

    def forward(self, x: Tensor, *context: Any, **options: Any) -> Any:
        (q, k, v), _ = self.arguments(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        heads = self.rule(scores, torch.ones_like(scores[0, 0], dtype=torch.bool).tril()) @ v
        self.largest = max(self.largest, float(heads.detach().abs().max()))
        return self.out(heads.transpose(1, 2).flatten(2))


class Run(NamedTuple):
    final: float  # mean loss of the last fifth of the steps, at most UNIFORM
    highest: float  # highest loss after FIRST steps
    largest: float  # largest output of a head

    @property
    def unstable(self) -> bool:
        return not self.highest <= UNIFORM


def run(rule: Rule, norms: bool, seed: int, steps: int) -> Run:
    torch.manual_seed(seed)
    layers = Weighted(rule), Weighted(rule)
    model, batches = language_model(layers, WIDTH, norms), texts(seed, LENGTH, BATCH)
    losses = trained(model, lambda: loss(model, batches), steps, RATE)
    capped = [x if x < UNIFORM else UNIFORM for x in losses]  # NaN too
    diverged = not math.isfinite(losses[-1])
    highest = math.inf if diverged else max(losses[FIRST:])
    final = UNIFORM if diverged else mean(capped[-max(1, steps // 5) :])
    return Run(final, highest, max(layer.largest for layer in layers))


def loss(model: torch.nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    x, y = next(batches)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


Runs = Mapping[str, Sequence[Run]]  # by rule


def explodes(runs: Runs) -> bool:
    return min(r.largest for r in runs["raw"]) > 10 * max(r.largest for r in runs["softmax"])


def unstable(runs: Sequence[Run]) -> int:
    return sum(r.unstable for r in runs)


def judge(plain: Runs, normed: Runs) -> str:
    """Returns the verdict from the runs without and with normalisation layers."""
    count, runs = unstable(plain["raw"]), len(plain["raw"])
    if 0 < 2 * count < runs or unstable(plain["softmax"]):
        return "undecided"
    if not count and not explodes(plain):
        return "wrong"
    needed = all(unstable(plain[name]) for name in OTHERS)  # no other normalisation trains stably
    everywhere = 2 * unstable(normed["raw"]) >= runs and explodes(normed)
    return "right" if count and explodes(plain) and needed and everywhere else "incomplete"


def measure(steps: int = 100, seeds: int = 3) -> Finding:
    plain = {name: [run(rule, False, s, steps) for s in range(seeds)] for name, rule in RULES.items()}
    normed = {name: [run(RULES[name], True, s, steps) for s in range(seeds)] for name in ("softmax", "raw")}
    lead = [a.final - b.final for a, b in zip(normed["raw"], normed["softmax"], strict=True)]
    compared = {1: "higher", -1: "lower", 0: "not measurably different,"}[sign(lead)]
    others = sum(unstable(plain[name]) for name in OTHERS)
    return Finding(
        claim="without softmax values explode, and training is unstable",
        verdict=judge(plain, normed),
        measured=f"largest output of a head {spread(plain['raw'])} (with softmax {spread(plain['softmax'])}"
        f"), unstable runs {unstable(plain['raw'])} of {seeds} (with softmax {unstable(plain['softmax'])}); "
        f"with LayerNorm, outputs reach {spread(normed['raw'])}, unstable runs {unstable(normed['raw'])} "
        f"of {seeds}, loss {compared} by {abs(mean(lead)):.2f} nats",
        correct="true of raw scores in a model without LayerNorm; other normalisations are enough: "
        "with scores divided by the number of keys or by the sum of their absolute values, "
        f"{others} of {len(OTHERS) * seeds} runs are unstable",
        numbers={
            **described(plain, "without LayerNorm"),
            **described(normed, "with LayerNorm"),
            "loss of raw scores minus loss of softmax, with LayerNorm": lead,
        },
    )


def spread(runs: Sequence[Run]) -> str:
    found = [r.largest for r in runs]
    low, high = (float(f"{x:.2g}") for x in (min(found), max(found)))
    return f"{low:,g} to {high:,g}"


def described(runs: Runs, place: str) -> dict[str, Any]:
    return {
        f"{name}, {place}": {
            "loss": [r.final for r in found],
            "highest loss": [r.highest for r in found],
            "largest output": [r.largest for r in found],
            "unstable runs": unstable(found),
        }
        for name, found in runs.items()
    }
