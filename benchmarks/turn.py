"""One engine of `make bench-peers`, in a process of its own: prepares cases and times them in turns.

`race.py` writes a line of JSON to stdin, which names a method of `Turns`, and reads a line with
the result. Between commands the process waits without using the CPU. Other output of the engine's
library goes to stderr.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import IO, Any

import torch
from cases import ENGINE_CASES, Inputs
from checks import WrongResult, verify
from engines import ENGINES, Engine
from install import ROOT
from peers import repeated
from torch import Tensor

HUGE = 1 << 21
ADVICE = {"2M": mmap.MADV_HUGEPAGE, "4K": mmap.MADV_NOHUGEPAGE}


def placed(pages: str, x: Tensor) -> Tensor:
    """Copies x to memory that begins at a multiple of 2 MiB, on pages of the given size."""
    size = x.numel() * x.element_size()
    block = mmap.mmap(-1, HUGE + -(-size // HUGE) * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(ADVICE[pages])
    memory = torch.frombuffer(block, dtype=torch.uint8)  # keeps the block alive
    first = -memory.data_ptr() % HUGE
    return (
        memory[first : first + size]
        .view(x.dtype)
        .view(x.shape)
        .copy_(x.detach())
        .requires_grad_(x.requires_grad)
    )


class Turns:
    """Answers the commands of `race.py`."""

    engine: Engine
    pages: str
    call: Callable[[], Any]
    calls: int

    def __init__(self) -> None:
        self.memory: list[Tensor] = []

    def start(self, name: str, threads: int, pages: str) -> str:
        """Imports the library of an engine. Returns an error message, or ""."""
        self.pages = pages
        torch.set_num_threads(threads)
        try:
            self.engine = ENGINES[name](threads, self.place)
        except (ImportError, OSError) as error:
            return brief(error)
        return ""

    def place(self, x: Tensor) -> Tensor:
        """Copies x to aligned memory, which stays until the next case."""
        self.memory.append(placed(self.pages, x))
        return self.memory[-1]

    def version(self) -> str:
        return self.engine.version()

    def prepare(self, name: str, shrink: int | None) -> str:
        """Builds the inputs of a case and runs its call once. Returns what is wrong, or ""."""
        self.__dict__.pop("call", None)
        self.memory.clear()
        case = next(case for case in ENGINE_CASES if case.name == name)
        case = case.shrunk(shrink) if shrink else case
        try:
            q, k, v, options = case.inputs()
            inputs = Inputs(*map(self.place, (q, k, v)), options)
            prepared = self.engine.prepare(case, inputs)
            result = prepared.result(prepared.run())
            if self.engine.attends:
                verify(case, inputs, result, self.engine.title, self.engine.slack)
        except WrongResult as error:
            return f"wrong: {error}"
        except Exception as error:
            return f"failed: {brief(error)}"
        self.call, self.calls = repeated(prepared.run, case.calls), case.calls
        return ""

    def time(self, seconds: float) -> list[float]:
        """Returns the seconds of each call within `seconds`. One call before them is not timed."""
        self.call()
        end, times = perf_counter() + seconds, []
        while not times or perf_counter() < end:
            begin = perf_counter()
            self.call()
            times.append((perf_counter() - begin) / self.calls)
        return times


def brief(error: Exception) -> str:
    """Returns the first line of an error message, without the path of this repository."""
    return f"{type(error).__name__}: {error}".splitlines()[0].replace(f"{ROOT}/", "")


def private_stdout() -> IO[str]:
    """Returns a file for answers, and sends what libraries print to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


@torch.no_grad()
def main() -> None:
    answers, turns = private_stdout(), Turns()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(turns, command)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
