"""Claim: multi-head attention has 3 d^2 parameters. `regard claims parameters`

The projections of queries, keys and values have 3 d^2 parameters. The output projection adds d^2,
and each of the four projections may have a bias of d parameters. The experiment counts the
parameters of PyTorch's module and of Regard's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.nn import Attention

from .finding import Finding, verdict

WIDTHS = 64, 512, 768


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def measure() -> Finding:
    modules: dict[str, Callable[[int, bool], nn.Module]] = {
        "nn.MultiheadAttention": lambda d, bias: nn.MultiheadAttention(d, 8, bias=bias, device="meta"),
        "regard.nn.Attention": lambda d, bias: Attention(d, 8, bias=bias, device="meta"),
    }
    plain = {name: {str(d): size(make(d, False)) for d in WIDTHS} for name, make in modules.items()}
    biased = {name: {str(d): size(make(d, True)) for d in WIDTHS} for name, make in modules.items()}
    three = all(count == 3 * int(d) ** 2 for counts in plain.values() for d, count in counts.items())
    first = plain["nn.MultiheadAttention"]["512"]
    return Finding(
        claim="multi-head attention has 3 d^2 parameters",
        verdict=verdict(three, "incomplete"),
        measured=f"{first:,} at d = 512, which is {first / 512**2:g} d^2",
        correct="4 d^2, or 4 d^2 + 4 d with biases",
        numbers={
            **{f"{name}, by d": counts for name, counts in plain.items()},
            **{f"{name} with biases": counts for name, counts in biased.items()},
        },
    )
