"""Times linear attention: forward (beside exact causal attention), backward, and decode steps.

`python benchmarks/linear.py` prints three tables, for 8 heads of 64 channels in float32:
- by length: exact `regard.attention`, and `linear_attention` with feature map and normaliser, also
  with its torch backend;
- by form (decay, delta rule): forward and backward;
- by length: a decode step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import command
import torch
import torch.nn.functional as F
from checks import WrongResult
from measure import best_times
from report import milliseconds
from torch import Tensor

import regard
from regard.cache import LinearCache

HEADS, D = 8, 64
CLASSIC: dict[str, Any] = {"feature_map": "elu+1", "normalize": True}
Call = Callable[[], Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 3.0, "row")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--training", type=int, default=16384, help="tokens of the second table")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    for table in (lengths, forms, steps):
        print("\n".join(table(options)), "\n")
    print(session.closing(f"{HEADS} heads of {D}, float32"))
    return 0


def inputs(L: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, L, D).unbind()
    return q, F.normalize(k, dim=-1), v


@torch.no_grad()
def lengths(options: argparse.Namespace) -> Iterator[str]:
    yield "| tokens | exact causal | linear | linear, torch backend | exact / linear |"
    yield "|---:|---:|---:|---:|---:|"
    for L in options.tokens:
        exact, linear, torch_backend = times_of(inputs(L), options.seconds)
        shown = " | ".join(milliseconds(t) for t in (exact, linear, torch_backend))
        yield f"| {L} | {shown} | {exact / linear:.0f} x |"


def times_of(qkv: tuple[Tensor, Tensor, Tensor], seconds: float) -> tuple[float, float, float]:
    """Returns the times of exact attention, and of linear attention with two backends.

    The backends are native and torch. Exact attention may take minutes, so it is timed separately.
    """
    check(*qkv)
    exact: dict[str, Call] = {"exact": lambda: regard.attention(*qkv, mask=regard.masks.Causal())}
    linear: dict[str, Call] = {
        impl: lambda impl=impl: regard.linear_attention(*qkv, **CLASSIC, impl=impl)
        for impl in ("native", "torch")
    }
    best = best_times(exact, seconds, least=1) | best_times(linear, seconds)
    return best["exact"], best["native"], best["torch"]


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compares the first outputs of linear attention with the recurrence in float64."""
    prefix = [x[:, :, :200] for x in (q, k, v)]
    out = regard.linear_attention(q, k, v, **CLASSIC)[:, :, :200]
    exact = regard.linear_attention(*prefix, **CLASSIC, impl="reference")
    error = float((out - exact).norm() / exact.norm())
    if not error < 1e-5:
        raise WrongResult(f"linear attention is off by {error:.1e}")


def forms(options: argparse.Namespace) -> Iterator[str]:
    yield f"| form, {options.training} tokens | forward | backward | backward / forward |"
    yield "|---|---:|---:|---:|"
    gates = torch.rand(2, 1, HEADS, options.training)
    decay, beta = -0.1 * gates[0], gates[1]
    gates_of: dict[str, dict[str, Tensor]] = {
        "plain": {},
        "decayed": {"log_decay": decay},
        "delta": {"beta": beta},
        "gated delta": {"log_decay": decay, "beta": beta},
    }
    for name, form in gates_of.items():
        best = best_times(passes(options.training, form), options.seconds)
        times = " | ".join(milliseconds(t) for t in best.values())
        yield f"| {name} | {times} | {best['backward'] / best['forward']:.2f} |"


def passes(L: int, gates: dict[str, Tensor]) -> dict[str, Call]:
    """Returns two functions, which run the forward and the backward pass of linear attention."""
    xs = [x.clone().requires_grad_() for x in inputs(L)]
    leaves = {name: x.clone().requires_grad_() for name, x in gates.items()}

    def forward() -> Tensor:
        out: Tensor = regard.linear_attention(
            xs[0], xs[1], xs[2], log_decay=leaves.get("log_decay"), beta=leaves.get("beta")
        )
        return out

    out = forward()
    dout = torch.randn_like(out)
    all_leaves = [*xs, *leaves.values()]
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, all_leaves, dout, retain_graph=True),
    }


@torch.no_grad()
def steps(options: argparse.Namespace) -> Iterator[str]:
    yield "| decode step after | microseconds | state, KiB |"
    yield "|---:|---:|---:|"
    calls: dict[str, Call] = {}
    sizes = {}
    for L in options.tokens:
        q, k, v = inputs(L)
        cache = LinearCache(1, HEADS, D)
        cache.attend(q, k, v)
        token = (q[:, :, :1], k[:, :, :1], v[:, :, :1])
        calls[str(L)] = lambda cache=cache, token=token: cache.attend(*token)
        sizes[str(L)] = cache.nbytes
    best = best_times(calls, options.seconds)
    for name, seconds in best.items():
        yield f"| {name} tokens | {1e6 * seconds:.0f} | {sizes[name] / 1024:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
