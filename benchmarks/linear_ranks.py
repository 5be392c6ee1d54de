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

import torch
import torch.nn.functional as F
from measure import best_times
from processes import Processes, agree, run_benchmark
from report import milliseconds
from torch import Tensor

import regard
from regard import distributed as D

WORKS = ("forward", "forward and backward")
FORMS: dict[str, dict[str, Any]] = {
    "normalised": {"feature_map": "elu+1", "normalize": True},
    "decay": {"log_decay": -0.02},
    "delta rule": {"feature_map": "unit", "beta": 0.5},
}
LAYOUTS: dict[str, Callable[[int, int], D.Layout]] = {"contiguous": D.contiguous, "zigzag": D.zigzag}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_benchmark(__doc__, arguments, table, "")


def table(options: argparse.Namespace, processes: Processes) -> list[str]:
    sizes, calls = (options.heads, options.tokens), {}
    for form in FORMS:
        for work in WORKS:
            single = partial(results, regard.linear_attention, inputs(*sizes), form, work)
            calls[form, "one process", work] = single
            for name, make in LAYOUTS.items():
                of_ranks = processes.run(shards, form, name, work, *sizes)
                agree(f"{form}, {name}, {work}", make(options.tokens, len(of_ranks)), single(), of_ranks)
                calls[form, name, work] = partial(processes.run, timed, form, name, work, *sizes)
    best = best_times(calls, options.seconds)
    lines = [f"| {options.threads} ranks | " + " | ".join(f"{work} | ratio" for work in WORKS) + " |"]
    lines.append("|---|" + "---:|" * 2 * len(WORKS))
    for form in FORMS:
        for name in ("one process", *LAYOUTS):
            times = ((best[form, name, work], best[form, "one process", work]) for work in WORKS)
            shown = " | ".join(f"{milliseconds(time)} | {time / one:.2f}" for time, one in times)
            lines.append(f"| {form}, {name} | {shown} |")
    return lines


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
