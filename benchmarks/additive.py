"""Compares additive attention with its plain formula and with dot-product attention.

`python benchmarks/additive.py` prints one row for each length, with time and peak memory of
- Regard: `regard.nn.AdditiveAttention`;
- formula: the same layer in four PyTorch operations, which allocate (L, L, hidden);
- dot product: `regard.nn.Attention` with one head of the same width.
The input is one sequence of 64 channels, also the hidden width. A second table has the times and
memory of forward and backward. Regard's results are compared with the formula first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import command
import torch
from checks import WrongResult
from measure import best_times
from report import mebibytes, milliseconds
from torch import Tensor

from regard.cost import peak_memory
from regard.nn import AdditiveAttention, Attention

WIDTH, LIMIT = 64, 1e-5  # LIMIT: largest relative error against the formula
Call = Callable[[], Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 3.0, "row")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048])
    options = parser.parse_args(arguments)
    session = command.Session(options)
    with torch.no_grad():
        print("\n".join(rows(options, training=False)), "\n")
    print("\n".join(rows(options, training=True)))
    print(session.closing(f"{WIDTH} channels, float32"))
    return 0


def rows(options: argparse.Namespace, training: bool) -> Iterator[str]:
    what = "forward and backward" if training else "forward"
    yield f"| tokens, {what} | Regard | formula | dot product | MiB, Regard | formula | dot product |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for L in options.tokens:
        calls = sides(L, training)
        best = best_times(calls, options.seconds, 1)
        times = " | ".join(milliseconds(best[name]) for name in calls)
        memory = " | ".join(mebibytes(peak_memory(call)) for call in calls.values())
        yield f"| {L} | {times} | {memory} |"


def sides(L: int, training: bool) -> dict[str, Call]:
    """Returns the timed calls. They have run once and agree with the formula."""
    torch.manual_seed(0)
    layer, dot = AdditiveAttention(WIDTH), Attention(WIDTH, 1)
    x = torch.randn(1, L, WIDTH, requires_grad=training)
    calls: dict[str, Call] = {
        "Regard": partial(layer, x), "formula": partial(formula, layer, x), "dot product": partial(dot, x),
    }  # fmt: skip
    if training:
        leaves = {"Regard": layer, "formula": layer, "dot product": dot}
        calls = {n: partial(gradients, call, [x, *leaves[n].parameters()]) for n, call in calls.items()}
    results = {name: call().detach() for name, call in calls.items()}
    error = float((results["Regard"] - results["formula"]).norm() / results["formula"].norm())
    if not error < LIMIT:
        raise WrongResult(f"Regard, {L} tokens: relative error {error:.1e} against the formula")
    return calls


def formula(layer: AdditiveAttention, x: Tensor) -> Tensor:
    scores = torch.tanh(layer.q(x)[:, :, None] + layer.k(x)[:, None]) @ layer.score
    return scores.softmax(-1) @ x


def gradients(call: Call, leaves: list[Tensor]) -> Tensor:
    """Computes the gradients of all leaves and returns the first."""
    out = call()
    return torch.autograd.grad(out, leaves, torch.ones_like(out))[0]


if __name__ == "__main__":
    sys.exit(main())
