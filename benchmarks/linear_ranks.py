"""Compares linear attention over processes of one thread with one process of as many threads.

`python benchmarks/linear_ranks.py` prints a row for each form and layout, with the time of one
process beside it. The results are compared with those of the single process first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import command
import torch
import torch.nn.functional as F
from checks import WrongResult
from measure import best_times
from processes import Processes
from report import milliseconds
from torch import Tensor

import regard
from regard import distributed as D

LIMIT = 1e-5  # largest relative error against the single process
WORKS = ("forward", "forward and backward")
FORMS: dict[str, dict[str, Any]] = {
    "normalised": {"feature_map": "elu+1", "normalize": True},
    "decay": {"log_decay": -0.02},
    "delta rule": {"feature_map": "unit", "beta": 0.5},
}
LAYOUTS: dict[str, Callable[[int, int], D.Layout]] = {"contiguous": D.contiguous, "zigzag": D.zigzag}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 60.0, "table")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args(arguments)
    session = command.Session(options)
    with Processes(options.threads) as processes:
        print("\n".join(table(options, processes)))
    shape = f"1, {options.heads}, {options.tokens}, 64"
    print(session.closing(f"{shape}, float32; {options.threads} processes of one thread"))
    return 0


def table(options: argparse.Namespace, processes: Processes) -> list[str]:
    sizes, calls = (options.heads, options.tokens), {}
    for form in FORMS:
        for work in WORKS:
            single = partial(results, regard.linear_attention, inputs(*sizes), form, work)
            calls[form, "one process", work] = single
            for layout in LAYOUTS:
                agree(single(), processes.run(shards, form, layout, work, *sizes), layout)
                calls[form, layout, work] = partial(processes.run, timed, form, layout, work, *sizes)
    best = best_times(calls, options.seconds)
    lines = [f"| {options.threads} ranks | " + " | ".join(f"{work} | ratio" for work in WORKS) + " |"]
    lines.append("|---|" + "---:|" * 2 * len(WORKS))
    for form in FORMS:
        for name in ("one process", *LAYOUTS):
            times = ((best[form, name, work], best[form, "one process", work]) for work in WORKS)
            shown = " | ".join(f"{milliseconds(time)} | {time / one:.2f}" for time, one in times)
            lines.append(f"| {form}, {name} | {shown} |")
    return lines


def agree(expected: Sequence[Tensor], of_ranks: list[list[Tensor]], name: str) -> None:
    """Raises WrongResult if the shards of a rank differ from the single process."""
    for rank, shares in enumerate(of_ranks):
        layout = LAYOUTS[name](expected[0].shape[2], len(of_ranks))
        for got, whole in zip(shares, expected, strict=True):
            share = D.shard(whole, layout, rank, 2)
            error = float((got - share).norm() / share.norm())
            if not error < LIMIT:
                raise WrongResult(f"{name}: relative error {error:.1e} on rank {rank}")


def inputs(heads: int, L: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, heads, L, 64, generator=generator) for _ in range(4))
    return [q, F.normalize(k, dim=-1), v, dout]


def results(call: Callable[..., Any], tensors: list[Tensor], form: str, work: str) -> list[Tensor]:
    """Returns out or, with backward, the gradients of q, k and v."""
    *qkv, dout = tensors
    leaves = [x.detach().requires_grad_(work != "forward") for x in qkv]
    out = call(*leaves, **FORMS[form])
    return [out] if work == "forward" else list(torch.autograd.grad(out, leaves, dout))


# In each process

_inputs: dict[Any, list[Tensor]] = {}


def shards(mesh: Any, form: str, name: str, work: str, heads: int, L: int) -> list[Tensor]:
    layout = LAYOUTS[name](L, mesh.size())
    if (name, heads, L) not in _inputs:
        _inputs[name, heads, L] = [
            D.shard(x, layout, mesh.get_local_rank(), 2).clone() for x in inputs(heads, L)
        ]
    call = partial(D.linear_attention, mesh=mesh, layout=layout)
    return results(call, _inputs[name, heads, L], form, work)


def timed(mesh: Any, *arguments: Any) -> None:
    shards(mesh, *arguments)


if __name__ == "__main__":
    sys.exit(main())
