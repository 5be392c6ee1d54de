"""One side of `make bench-against`: times rows with the `regard` that this process imports.

This file runs with the `regard` of both commits, so this file and the modules of benchmarks/ that
it imports use only public names. `against.py` writes a line of JSON to stdin, which names a method
of `Side`, and reads a line with the result. Between commands the process waits without using the
CPU.
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
from checks import verify
from peers import Call, prepare, repeated
from steps import CACHES, HELD, LONG_CACHES, LONG_HEADS, LONG_HELD, STEPS, Generation

import regard
from regard.cache import KVCache
from regard.info import report


class Timed(NamedTuple):
    """The call that is timed for one row of the table."""

    call: Call
    check: Callable[[Any], None]  # checks the call's result; may raise WrongResult
    parts: int  # attention calls or decode steps in one call


Make = Callable[[int | None], Timed]  # (tokens to which the case is cut, or None) -> call

# Rows


def of_case(case: Case, shrink: int | None) -> Timed:
    case = case.shrunk(shrink) if shrink else case
    inputs = case.inputs()
    call = prepare("regard", case, inputs)
    return Timed(call, lambda result: verify(case, inputs, result, "regard"), case.calls)


def with_lse(case: Case, shrink: int | None) -> Timed:
    inputs = case.inputs()
    q, k, v, _ = inputs
    call = repeated(lambda: regard.attention(q, k, v, return_lse=True)[0], case.calls)
    return Timed(call, lambda result: verify(case, inputs, result, "regard"), case.calls)


def of_cache(make: Callable[[], Any], shrink: int | None) -> Timed:
    generation = Generation(make())
    return Timed(generation.run, generation.check, STEPS)


def of_long_cache(make: Callable[[], Any], shrink: int | None) -> Timed:
    generation = Generation(make(), LONG_HEADS, shrink or LONG_HELD, 1)
    return Timed(generation.run, generation.check, 1)


def of_new_cache(shrink: int | None) -> Timed:
    """Returns decode steps with lengths and strides that the process has not seen before.

    So every call is checked anew, as when a process generates text for the first time.
    """
    capacities = itertools.cycle(range(HELD + STEPS, 4096, 2))

    def fresh() -> Generation:
        return Generation(KVCache(1, 2, 64, capacity=next(capacities)))

    return Timed(lambda: fresh().run(), fresh().check, STEPS)


tiny = partial(square, L=64, Lq=1, calls=300)
TINY = (
    tiny("tiny-causal", "tiny calls, causal", mask=causal),
    tiny("tiny-sink", "tiny calls, sink", options=sink),
    square("tiny-training", "tiny training steps", 16, 16, Hq=2, Hkv=2, work="training", calls=50),
)
ROWS: dict[str, Make] = {
    **{case.name: partial(of_case, case) for case in (*CASES, *TINY)},
    "tiny-lse": partial(with_lse, tiny("tiny-lse", "tiny calls, LSE")),
    **{f"step of {name}": partial(of_cache, make) for name, make in CACHES.items()},
    "step of a new KVCache": of_new_cache,
    **{f"step at 8192 tokens, {name}": partial(of_long_cache, make) for name, make in LONG_CACHES.items()},
}

# Commands


class Side:
    """Answers the commands of `against.py`."""

    timed: Timed

    def file(self) -> str | None:
        return regard.__file__

    def isa(self) -> str:
        return report().get("native isa", "none")

    def prepare(self, row: str, shrink: int | None, checked: bool) -> str:
        """Builds the inputs of a row and runs its call once. Returns an error message, or ""."""
        self.__dict__.pop("timed", None)  # frees the tensors of the previous row
        try:
            self.timed = ROWS[row](shrink)
            result = self.timed.call()
            if checked:
                self.timed.check(result)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def time(self, seconds: float) -> float:
        return best_time(self.timed.call, seconds) / self.timed.parts


def best_time(call: Call, seconds: float) -> float:
    """Returns the time of the fastest call within `seconds`. At least one call runs."""
    begin, times = perf_counter(), []
    while not times or perf_counter() - begin < seconds:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


@torch.no_grad()
def main(threads: int) -> None:
    torch.set_num_threads(threads)
    side = Side()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(side, command)(*arguments)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
