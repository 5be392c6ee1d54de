"""Claim: a Transformer can approximate any sequence-to-sequence function, under suitable conditions.
`regard claims universal`

The notes do not name the conditions. The theorem (Yun and others 2020, arXiv 1912.10077) is about
continuous functions of sequences of one fixed length, on a bounded set of inputs, and about the
mean error over this set. For each such function and each error, there are weights of a Transformer
with learned positions and enough layers that reach the error. Without positions, only functions
that commute with permutations of the tokens can be reached. BigBird has the same theorem for sparse
attention in which one token sees all tokens and is seen by all (Zaheer and others 2020). Neither
theorem says that training finds the weights, that few layers are enough, or anything about other
lengths and other inputs.

The experiment fits y_i = sin(3 x_{i-1}) (1 + x_i) to sequences of six numbers in [-1, 1], with one
layer of growing width. Without positions, the best answer is the mean over all tokens that could be
the previous one, whose error is computed. All errors are relative to the variance of y.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import EncoderBlock, Stack

from .finding import Finding
from .training import trained

LENGTH, BATCH, RATE = 6, 128, 5e-3
WIDTHS = 4, 8, 16, 32
REACHED, MISSED = 0.05, 0.5  # relative errors below and above which a function counts as reached, missed


def pairs(x: Tensor) -> Tensor:
    """Returns f(x_i, x_j) of all pairs of tokens (B, i, j)."""
    return torch.sin(3 * x[:, None, :]) * (1 + x[:, :, None])


def target(x: Tensor) -> Tensor:
    """Returns f(x_i, x_{i-1}): (B, L) -> (B, L). The token before the first is the last."""
    return torch.sin(3 * x.roll(1, 1)) * (1 + x)


def without_order(x: Tensor) -> Tensor:
    """Returns the best answer of a function that does not know the order of the other tokens."""
    f = pairs(x)
    return (f.sum(2) - f.diagonal(dim1=1, dim2=2)) / (x.shape[1] - 1)


class Model(nn.Module):
    """One encoder block, with or without learned positions: (B, L) -> (B, L)."""

    def __init__(self, width: int, positions: bool) -> None:
        super().__init__()
        self.number, self.out = nn.Linear(1, width), nn.Linear(width, 1)
        self.place = nn.Parameter(torch.randn(LENGTH, width)) if positions else None
        self.stack = Stack([EncoderBlock(width, 2)], nn.LayerNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        states = self.number(x[..., None])
        out: Tensor = self.out(self.stack(states if self.place is None else states + self.place))
        return out[..., 0]


def numbers(count: int, seed: int) -> Tensor:
    """Returns sequences (count, LENGTH) of numbers in [-1, 1]."""
    return 2 * torch.rand(count, LENGTH, generator=torch.Generator().manual_seed(seed)) - 1


def error(answer: Tensor, y: Tensor) -> float:
    return float((answer - y).square().mean() / y.var())


@torch.no_grad()
def tested(model: nn.Module, scale: float) -> float:
    """Returns a model's error on new sequences of numbers in [-scale, scale]."""
    x = scale * numbers(4096, seed=1)
    return error(model(x), target(x))


def fitted(width: int, positions: bool, seed: int, steps: int) -> tuple[float, float]:
    """Trains a model. Returns its error in [-1, 1] and in [-2, 2]."""
    torch.manual_seed(seed)
    model = Model(width, positions)

    def loss() -> Tensor:
        x = 2 * torch.rand(BATCH, LENGTH) - 1
        return F.mse_loss(model(x), target(x))

    trained(model, loss, steps, RATE)
    return tested(model, 1), tested(model, 2)


def judge(without: list[float], with_positions: list[float]) -> str:
    """Returns the verdict from the errors at the largest width, one for each seed."""
    if min(with_positions) > MISSED:
        return "wrong"
    if max(with_positions) > REACHED:
        return "undecided"
    if max(without) < REACHED:
        return "right"
    return "incomplete" if min(without) > MISSED else "undecided"


def measure(steps: int = 500, seeds: int = 2) -> Finding:
    found = {
        positions: {width: [fitted(width, positions, s, steps) for s in range(seeds)] for width in WIDTHS}
        for positions in (False, True)
    }
    largest = {p: [inside for inside, _ in rows[WIDTHS[-1]]] for p, rows in found.items()}
    x = numbers(100_000, seed=0)
    floor = error(without_order(x), target(x))
    best = {p: [min(inside for inside, _ in row) for row in rows.values()] for p, rows in found.items()}
    outside = min(out for _, out in found[True][WIDTHS[-1]])
    return Finding(
        claim="a Transformer can approximate any sequence-to-sequence function, under suitable conditions",
        verdict=judge(largest[False], largest[True]),
        measured=f"error at width {' / '.join(map(str, WIDTHS))}: {row(best[True])} with positions, "
        f"{row(best[False])} without (the least possible is {floor:.2f})",
        correct="the conditions are continuity, a bounded set of inputs, one fixed length, positions, and "
        "depth or width as needed; without positions, only functions that commute with permutations; the "
        "theorem says that weights exist, not that training finds them, and nothing about other inputs "
        f"(error {outside:.2f} for inputs twice as large)",
        numbers={
            **{
                f"error at width {width}, {'with' if p else 'without'} positions": [e for e, _ in row]
                for p, rows in found.items()
                for width, row in rows.items()
            },
            "least error without positions": floor,
            "errors at the largest width, without and with positions": [largest[False], largest[True]],
            "error in [-2, 2], with positions": outside,
        },
    )


def row(errors: list[float]) -> str:
    return " / ".join(f"{e:.2g}" for e in errors)
