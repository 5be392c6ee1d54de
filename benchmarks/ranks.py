"""Compares attention over processes of one thread with one process of as many threads.

`python benchmarks/ranks.py` prints a row for each method and layout: the time of a causal call,
forward, and forward and backward, and its ratio to the time of one process. The processes start
once and take turns with the single process. Their results are compared with those of the single
process first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from measure import best_times
from processes import Processes, agree, run_benchmark
from report import milliseconds
from torch import Tensor

import regard
from regard import distributed as D, masks as M

WORKS = ("forward", "forward and backward")


class Row(NamedTuple):
    """A way to compute the call over processes."""

    method: str
    layout: str

    def make_layout(self, L: int, ranks: int) -> D.Layout:
        if self.layout == "balanced":
            return D.balanced(M.Causal(), L, ranks)
        make: Callable[[int, int], D.Layout] = getattr(D, self.layout)
        return make(L, ranks)


ROWS = {
    f"{row.method}, {row.layout}": row
    for row in (
        Row("ring", "zigzag"), Row("ring", "balanced"), Row("gather", "zigzag"), Row("ulysses", "contiguous")
    )
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows of the table")

    return run_benchmark(__doc__, arguments, table, "causal, ", configure)


def table(options: argparse.Namespace, processes: Processes) -> list[str]:
    sizes, calls = (options.heads, options.tokens), {}
    for work in WORKS:
        single = partial(in_one_process, inputs(*sizes), work)
        calls[work, "one process"] = single
        for name in options.only:
            row = ROWS[name]
            processes.run(prepare, row, *sizes)
            layout = row.make_layout(options.tokens, options.threads)
            agree(f"{name}, {work}", layout, single(), processes.run(shards, row, work))
            calls[work, name] = partial(processes.run, timed, row, work)
    best = best_times(calls, options.seconds)
    lines = [f"| {options.threads} ranks | " + " | ".join(f"{work} | ratio" for work in WORKS) + " |"]
    lines.append("|---|" + "---:|" * 2 * len(WORKS))
    for name in ("one process", *options.only):
        times = [
            f"{milliseconds(best[work, name])} | {best[work, name] / best[work, 'one process']:.2f}"
            for work in WORKS
        ]
        lines.append(f"| {name} | " + " | ".join(times) + " |")
    return lines


def inputs(heads: int, L: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, heads, L, 64, generator=generator) for _ in range(4)]


def in_one_process(tensors: list[Tensor], work: str) -> list[Tensor]:
    *qkv, dout = tensors
    return results(lambda q, k, v: regard.attention(q, k, v, mask=M.Causal()), qkv, dout, work)


def results(
    call: Callable[[Tensor, Tensor, Tensor], Any], qkv: list[Tensor], dout: Tensor, work: str
) -> list[Tensor]:
    """Returns out or, with backward, the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_(work != "forward") for x in qkv]
    out = call(*leaves)
    return [out] if work == "forward" else list(torch.autograd.grad(out, leaves, dout))


# In each process

_prepared: dict[Row, tuple[D.Layout, list[Tensor]]] = {}


def prepare(mesh: Any, row: Row, heads: int, L: int) -> None:
    layout = row.make_layout(L, mesh.size())
    rank = mesh.get_local_rank()
    # A copy: a view would keep the tensors of the whole sequence.
    tensors = [D.shard(x, layout, rank, 2).clone() for x in inputs(heads, L)]
    _prepared[row] = layout, tensors


def shards(mesh: Any, row: Row, work: str) -> list[Tensor]:
    layout, (*qkv, dout) = _prepared[row]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return D.attention(q, k, v, mesh=mesh, layout=layout, method=row.method, mask=M.Causal())

    return results(call, qkv, dout, work)


def timed(mesh: Any, row: Row, work: str) -> None:
    shards(mesh, row, work)


if __name__ == "__main__":
    sys.exit(main())
