"""Makes every allocation of the core fail once, in every kind of call.

Run as a module, in a process that preloads the library built from `failing_malloc.cpp`. A call that
raises MemoryError is repeated and must then give the same bits as without a failure.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard import cache, facts, masks as M
from regard._api import stored
from regard._backends.native import repeat
from regard._backends.native.core import _core
from regard._call import make

PRELOADED = ctypes.CDLL(None)
PRELOADED.watch.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
MASK = (M.Window(9, 0) | M.Global([0])) & M.Documents(torch.arange(70) // 30)
ROWS = torch.randn(2, 4, 70, 32, generator=torch.Generator().manual_seed(0))
errors: list[MemoryError] = []


def retry(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns call(...). Records a MemoryError and calls once more."""
    try:
        return call(*args, **options)
    except MemoryError as error:
        errors.append(error)
        return call(*args, **options)


def forward() -> list[Tensor]:
    return [
        retry(regard.attention, ROWS, ROWS, ROWS, mask=MASK),
        retry(regard.attention, ROWS, ROWS, ROWS, mask=M.PerHead([M.Causal(), M.Dilated(3)] * 2)),
        retry(regard.attention, ROWS, ROWS, ROWS, bias=torch.ones(70, 70), return_lse=True)[1],
    ]


def decode() -> list[Tensor]:
    return [retry(regard.attention, ROWS[..., :1, :], ROWS, ROWS, mask=M.Lengths(torch.tensor([5, 60])))]


def backward() -> list[Tensor]:
    inputs = [ROWS.clone().requires_grad_() for _ in range(3)]
    out = retry(regard.attention, *inputs, mask=MASK, dropout=0.1, seed=3)
    return list(retry(torch.autograd.grad, out.sum(), inputs, retain_graph=True))


def evidence() -> list[Tensor]:
    want = facts.ColumnMass(), facts.Entropy(), facts.TopK(3), facts.BlockMass(16)
    mass, entropy, top, blocks = retry(regard.evidence, ROWS, ROWS, None, *want, mask=MASK)
    return [mass, *entropy, *top, *blocks.levels]


def linear() -> list[Tensor]:
    inputs = [ROWS.clone().requires_grad_() for _ in range(3)]
    out = retry(regard.linear_attention, *inputs, causal=True)
    return list(retry(torch.autograd.grad, out.sum(), inputs, retain_graph=True))


def plan() -> list[Tensor]:
    return [torch.tensor(retry(regard.plan, ROWS, ROWS, ROWS, mask=MASK).flops)]


def steps(store: Any) -> list[Tensor]:
    sizes = (69, 70), (0, 3), (3, 4), (4, 5)
    return [retry(store.attend, *(3 * (ROWS[..., i:j, :],))) for i, j in sizes]


def paged() -> list[Tensor]:
    store = cache.PagedCache(16, 4, 32)
    store.add(), store.add()
    return steps(store)


KINDS: dict[str, Callable[[], list[Tensor]]] = {
    "forward": forward, "decode": decode, "backward": backward, "evidence": evidence, "linear": linear,
    "plan": plan, "paged": paged,
    "cache": lambda: steps(cache.KVCache(2, 4, 32)),
    "sliding": lambda: steps(cache.SlidingCache(2, 4, 32, window=4)),
    "quantized": lambda: steps(cache.QuantizedCache(2, 4, 32, bits=4)),
}  # fmt: skip


def run(kind: str, failing: int = -1) -> tuple[list[Tensor], int]:
    """Runs a kind of call while allocation `failing` fails, and counts the core's allocations.

    A new thread and empty memories of checked calls let the call allocate all that a first call does.
    """
    make.specs.clear()
    stored._prepared.clear()
    repeat.forget()
    results: list[Tensor] = []
    PRELOADED.arm(failing)
    thread = threading.Thread(target=lambda: results.extend(KINDS[kind]()))
    thread.start()
    thread.join()
    count = PRELOADED.count()
    PRELOADED.arm(-1)
    return results, count


def watch_core() -> None:
    name = Path(_core.__file__).name
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    ends = [line.split()[0].split("-") for line in lines]
    PRELOADED.watch(int(ends[0][0], 16), int(ends[-1][1], 16))


def main() -> None:
    watch_core()
    for kind in sys.argv[1:] or KINDS:
        want, _ = run(kind)
        for i in itertools.count():  # the number of allocations depends on how threads share the tasks
            print(kind, i, flush=True)  # the last line names the allocation that ended the process
            errors.clear()
            results, count = run(kind, i)
            if count <= i:
                break
            assert len(errors) == 1, f"{kind}, allocation {i}: {len(errors)} MemoryErrors"
            assert len(results) == len(want), f"{kind}, {i}"
            assert all(map(torch.equal, results, want)), f"{kind}, {i}"
        assert i > 0


if __name__ == "__main__":
    main()
