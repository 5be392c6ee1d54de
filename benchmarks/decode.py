"""Compares decode with a plain read of the same keys and values by the same threads.

`python benchmarks/decode.py` prints, for each decode case of `make bench` and size of pages, the
milliseconds of the plain read and of Regard, and their ratio. The two alternate. In each column the
first number comes from the best times, the second from the medians.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import command
import torch
from cases import CASES, Case, Inputs, chosen
from checks import verify
from peers import prepare
from torch import Tensor

from regard._backends.native import core

DECODING = tuple(case for case in CASES if case.name.startswith("decode-"))
PAGES = {"4 KiB": mmap.MADV_NOHUGEPAGE, "2 MiB": mmap.MADV_HUGEPAGE}
LEAST = 3  # rounds
Times = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 2.0)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a case's name")
    parser.add_argument("--shrink", type=int, metavar="L", help="cut cases to L keys")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    print("| case | B, heads, Lq/Lk, D | pages | plain read, ms | Regard, ms | ratio |")
    print("|---|---|---|---:|---:|---:|")
    for case in chosen(options.only, DECODING):
        small = case.shrunk(options.shrink) if options.shrink else case
        for pages, advice in PAGES.items():
            times = measure(small, advice, options.threads, options.seconds)
            print(f"| {case.title} | {small.shape} | {pages} | {' | '.join(columns(times))} |", flush=True)
    print(session.closing("Best, median"))
    return 0


@torch.no_grad()
def measure(case: Case, advice: int, threads: int, seconds: float) -> Times:
    """Returns the seconds of each call in alternating rounds, after a check of Regard's result."""
    q, k, v, options = case.inputs()
    inputs = Inputs(q, in_pages(k, advice), in_pages(v, advice), options)
    calls: dict[str, Callable[[], Any]] = {
        "read": partial(core.read_probe, inputs.k, inputs.v, threads=threads),
        "regard": prepare("regard", case, inputs),
    }
    verify(case, inputs, calls["regard"](), "regard")
    times: Times = {name: [] for name in calls}
    begin = perf_counter()
    while len(times["read"]) < LEAST or perf_counter() - begin < seconds:
        for name, call in calls.items():
            start = perf_counter()
            call()
            times[name].append(perf_counter() - start)
    return times


def in_pages(x: Tensor, advice: int) -> Tensor:
    """Returns a copy of a tensor in memory for which the kernel got `advice` about its pages."""
    memory = mmap.mmap(-1, x.nbytes)
    memory.madvise(advice)
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x)


def columns(times: Times) -> list[str]:
    """Returns the cells of a row: times of the plain read and of Regard, and their ratio."""
    best, middle = ({name: of(rounds) for name, rounds in times.items()} for of in (min, median))
    cells = [f"{1e3 * best[name]:.3f}, {1e3 * middle[name]:.3f}" for name in times]
    return [*cells, f"{best['regard'] / best['read']:.2f}, {middle['regard'] / middle['read']:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
