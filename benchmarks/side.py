"""One side of `make bench-against`: times rows with the `regard` that this process imports.

The same file runs with the `regard` of either commit, so everything here, and in the modules of benchmarks/ that it
imports, uses only public names. `against.py` sends lines of JSON to stdin and gets one line back for each:
["prepare", row, shrink] is answered by what is wrong with the row's result ("": nothing), ["time", seconds] by the
seconds of the best call. Between two lines the process waits and takes no CPU.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from cases import CASES, Case, causal, sink, square
from checks import check, verify
from peers import Call, prepare, repeated
from steps import CACHES, HELD, LONG_CACHES, LONG_HEADS, LONG_HELD, STEPS, Generation

import regard
from regard.cache import KVCache
from regard.info import report

tiny = partial(square, L=64, Lq=1, calls=300)
TINY = (
    tiny("tiny-causal", "tiny calls, causal", mask=causal),
    tiny("tiny-sink", "tiny calls, sink", options=sink),
    square("tiny-training", "tiny training steps", 16, 16, Hq=2, Hkv=2, work="training", calls=50),
)


class Timed(NamedTuple):
    """A call whose result was checked, and how many calls or steps of Regard are in it."""

    call: Call
    parts: int


Prepare = Callable[[int | None], Timed]


def of_case(case: Case, shrink: int | None) -> Timed:
    case = case.shrunk(shrink) if shrink else case
    inputs = case.inputs()
    call = prepare("regard", case, inputs)
    verify(case, inputs, call(), "regard")
    return Timed(call, case.calls)


def with_lse(shrink: int | None) -> Timed:
    """Tiny calls that also return the LSE."""
    case = tiny("tiny-lse", "tiny calls, return_lse")
    inputs = case.inputs()
    q, k, v, _ = inputs
    call = repeated(lambda: regard.attention(q, k, v, return_lse=True)[0], case.calls)
    check(case, inputs, call(), "regard")
    return Timed(call, case.calls)


def of_cache(make: Callable[[], Any], shrink: int | None) -> Timed:
    generation = Generation(make())
    generation.check(generation.run())
    return Timed(generation.run, STEPS)


def of_long_cache(make: Callable[[], Any], shrink: int | None) -> Timed:
    generation = Generation(make(), LONG_HEADS, shrink or LONG_HELD, 1)
    generation.check(generation.run())
    return Timed(generation.run, 1)


def of_new_cache(shrink: int | None) -> Timed:
    """Steps at lengths and strides that were never seen before, as in the first generation of a process."""
    capacities = itertools.cycle(range(HELD + STEPS, 4096, 2))
    first = Generation(KVCache(1, 2, 64, capacity=HELD + STEPS))
    first.check(first.run())
    return Timed(lambda: Generation(KVCache(1, 2, 64, capacity=next(capacities))).run(), STEPS)


ROWS: dict[str, Prepare] = {
    **{case.name: partial(of_case, case) for case in (*CASES, *TINY)},
    "tiny-lse": with_lse,
    **{f"step of {name}": partial(of_cache, make) for name, make in CACHES.items()},
    "step of a new KVCache": of_new_cache,
    **{f"step of 8192 tokens, {name}": partial(of_long_cache, make) for name, make in LONG_CACHES.items()},
}


def best_time(call: Call, seconds: float) -> float:
    """Returns the time of the fastest call within `seconds`, at least one. The first calls warm the caches."""
    begin = last = perf_counter()
    best = float("inf")
    while last - begin < seconds or best == float("inf"):
        start = perf_counter()
        call()
        last = perf_counter()
        best = min(best, last - start)
    return best


class Side:
    """Answers the commands of `against.py`."""

    def __init__(self) -> None:
        self.timed: Timed | None = None

    def prepare(self, row: str, shrink: int | None) -> str:
        self.timed = None  # frees the tensors of the row before
        try:
            self.timed = ROWS[row](shrink)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def time(self, seconds: float) -> float:
        assert self.timed is not None
        return best_time(self.timed.call, seconds) / self.timed.parts


@torch.no_grad()
def main(threads: int) -> None:
    torch.set_num_threads(threads)
    side = Side()
    answer: Any = {"file": regard.__file__, "isa": report().get("native isa", "none")}
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(side, command)(*arguments)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
