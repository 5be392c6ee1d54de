"""Measures the peak memory of cases with Regard or a PyTorch path, in a separate process.

`python benchmarks/memory.py CASE:SIDE ...` prints a line ["CASE:SIDE", bytes] for each argument.
The bytes exclude q, k and v, and include the mask, the result and all temporary memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from regard.cost import peak_memory

# Makes malloc return freed blocks to the system at once. Otherwise reused blocks would hide later
# allocations.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


def measure(labels: Iterable[str], threads: int, L: int | None = None) -> Iterator[tuple[str, int]]:
    """Measures each label, "CASE:SIDE", in a child process. Yields pairs (label, peak bytes).

    Yields nothing if the system does not report memory.
    """
    command = [sys.executable, __file__, "--threads", str(threads), *(["--shrink", str(L)] if L else [])]
    environment = os.environ | ALLOCATOR
    with subprocess.Popen([*command, *labels], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            label, extra = json.loads(line)
            if extra is not None:
                yield label, extra


def measure_here(label: str, L: int | None) -> int | None:
    from cases import Case, chosen
    from peers import prepare
    from scaling import LONG

    name, side = label.split(":")
    case: Case = next(c for c in (*chosen([]), LONG) if c.name == name)
    case = replace(case.shrunk(L) if L else case, calls=1)
    inputs = case.inputs()
    first = case if side == "flex" else case.shrunk(64)  # warm-up: compiles, starts the threads
    peak_memory(prepare(side, first, inputs if side == "flex" else first.inputs()))
    return peak_memory(lambda: prepare(side, case, inputs)())


def main(arguments: list[str]) -> None:
    import torch

    threads = int(arguments[arguments.index("--threads") + 1])
    L = int(arguments[arguments.index("--shrink") + 1]) if "--shrink" in arguments else None
    torch.set_num_threads(threads)
    for label in arguments:
        if ":" in label:
            print(json.dumps([label, measure_here(label, L)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
