"""Compares the instruction sets of the native kernels on this CPU.

`python benchmarks/isas.py` prints one row per call, with its time on each instruction set that the
CPU can run. Calls on different instruction sets alternate, and the shortest times count. The results
are compared first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import command
import torch
from checks import WrongResult
from measure import best_times
from report import milliseconds
from torch import Tensor

import regard
from regard import masks
from regard._backends.native import core

LIMIT = 2e-2  # largest relative difference of two results; 16-bit outputs are rounded to 8 bits
Call = Callable[[], Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 2.0, "row")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args(arguments)
    session = command.Session(options)
    names = [name for name in core.isas() if name != "wide"]  # only tests use `wide`
    print(f"| call | {' | '.join(names)} | {names[0]}, times as fast as {names[-1]} |")
    print(f"|---|{'---:|' * (len(names) + 1)}")
    for title, call in calls(options.tokens).items():
        agree(title, call, names)
        best = best_times({name: partial(run, name, call) for name in names}, options.seconds, 1)
        times = " | ".join(milliseconds(best[name]) for name in names)
        print(f"| {title} | {times} | {best[names[-1]] / best[names[0]]:.2f} |")
    print(session.closing(f"8 heads, {options.tokens} tokens, D 64"))
    return 0


def calls(n: int) -> dict[str, Call]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, n, 64)
    causal, window = masks.Causal(), masks.sliding(256)
    step = torch.randn(1, 8, 1, 64)
    return {
        "dense": partial(regard.attention, q, k, v),
        "causal": partial(regard.attention, q, k, v, mask=causal),
        "causal, bfloat16": partial(regard.attention, *(x.bfloat16() for x in (q, k, v)), mask=causal),
        "window of 256": partial(regard.attention, q, k, v, mask=window),
        "causal, forward and backward": partial(gradient, q, k, v),
        "one decode step": partial(regard.attention, step, k, v),
    }


def gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    leaf = q.detach().requires_grad_()
    out = regard.attention(leaf, k.detach().requires_grad_(), v, mask=masks.Causal())
    return torch.autograd.grad(out.sum(), leaf)[0]


def run(isa: str, call: Call) -> Tensor:
    with core.use_isa(isa):
        return call()


def agree(title: str, call: Call, isas: Sequence[str]) -> None:
    """Raises WrongResult if the results of the instruction sets differ."""
    first, *others = (run(isa, call).double() for isa in isas)
    for isa, other in zip(isas[1:], others, strict=True):
        difference = float((other - first).norm() / first.norm())
        if not difference < LIMIT:
            raise WrongResult(f"{title}, {isa}: relative difference {difference:.1e} from {isas[0]}")


if __name__ == "__main__":
    sys.exit(main())
