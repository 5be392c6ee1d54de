"""Measures the peak memory that a call with 4096 tokens adds.

`python peak_memory.py plain bias+dropout` prints bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import regard
from regard import masks as M
from regard.scores import Alibi, RelativeBias

L, H, D = 4096, 8, 64

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask": M.Causal()},
    "window": lambda: {"mask": M.Window(256, 16)},
    "padding": lambda: {"mask": M.Lengths([L - 99])},
    "packed": lambda: {"mask": M.Documents(torch.arange(L) // 300) & M.Causal()},
    "dense": lambda: {"mask": M.Dense(torch.rand(L, L) < 0.5)},
    "longformer": lambda: {"mask": M.longformer((128, 128), [0, 7])},
    "bias": lambda: {"bias": torch.randn(L, L)},
    "row_bias": lambda: {"bias": torch.randn(1, H, 1, L)},
    "alibi": lambda: {"bias": Alibi.standard(H)},
    "relative": lambda: {"bias": RelativeBias(torch.randn(32, H))},
    "softcap": lambda: {"softcap": 5.0},
    "sink": lambda: {"sink": torch.randn(H)},
    "dropout": lambda: {"dropout": 0.1, "seed": 1},
    "lse": lambda: {"return_lse": True},
    "offsets": lambda: {"offset": torch.tensor([3])},
}


def status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def resident() -> int:
    return status("VmRSS")


def inputs(names: set[str]) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if "bfloat16" in names else torch.float32
    heads = 1 if "grouped" in names else H
    if "strided" in names:
        return [torch.randn(1, L, n, D).to(dtype).transpose(1, 2) for n in (H, heads, heads)]
    return [torch.randn(1, n, L, D).to(dtype) for n in (H, heads, heads)]


def measure(call: Callable[[], Any]) -> int:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
        refs.write("5")  # resets the peak
    before = resident()
    call()
    return status("VmHWM") - before


def extra(name: str) -> int:
    names = set(name.split("+"))
    q, k, v = inputs(names)
    options: dict[str, Any] = {"impl": "native"}
    for option_name in names & set(OPTIONS):
        options |= OPTIONS[option_name]()
    # The first call may load code: take the smaller of two.
    return min(measure(lambda: regard.attention(q, k, v, **options)) for _ in range(2))


def extra_long() -> int:
    x = torch.randn(1, 1, 100_000, 64)
    return measure(lambda: regard.attention(x, x, x, mask=M.Causal(), impl="native"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for wanted in sys.argv[1:]:
        print(wanted, extra_long() if wanted == "long" else extra(wanted), flush=True)
