"""Claim: FlashAttention is 2 to 4 times as fast. `regard claims flash_speed`

FlashAttention was measured on GPUs, where it saves transfers of the n x n weights to the GPU's main
memory. This experiment runs on a CPU. It compares softmax(Q K^T / sqrt(d)) V in PyTorch, which
stores the weights, with two kernels that work in tiles: PyTorch's fused
`scaled_dot_product_attention` and `regard.attention`. The calls take turns, and the shortest times
count. All ratios are measured twice. A ratio decides something only if both measurements are on the
same side of a bound, by at least a tenth. The experiment takes about a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard.cost import best_times

from .finding import Finding
from .formula import attend

HEADS, D = 8, 64
CLAIMED = 2.0, 4.0
MARGIN = 0.1

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Key = tuple[str, str, int]  # kernel, pass, length


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Runs PyTorch's fused kernel. Raises RuntimeError if PyTorch has none for the call."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return out


CALLS: dict[str, Call] = {"formula": attend, "PyTorch": fused, "Regard": regard.attention}


def forward(call: Call, inputs: Tensor) -> None:
    with torch.no_grad():
        call(*inputs)


def backward(call: Call, inputs: Tensor) -> None:
    """Runs forward and backward."""
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    call(q, k, v).sum().backward()


PASSES = {"forward": forward, "forward and backward": backward}


def ratios(lengths: Iterable[int], seconds: float) -> tuple[dict[Key, float], dict[str, list[float]], float]:
    """Times all calls for about `seconds`.

    Returns the formula's time divided by a kernel's time for each case, the milliseconds of each
    call and pass by length, and the largest error of a kernel's output.
    """
    found: dict[Key, float] = {}
    milliseconds: dict[str, list[float]] = {}
    error = 0.0
    lengths = tuple(lengths)
    for n in lengths:
        inputs = torch.randn(3, 1, HEADS, n, D, generator=torch.Generator().manual_seed(0))
        exact = attend(*inputs)
        error = max(error, *(float((call(*inputs) - exact).abs().max()) for call in CALLS.values()))
        for title, run in PASSES.items():
            calls = {name: partial(run, call, inputs) for name, call in CALLS.items()}
            times = best_times(calls, seconds / len(lengths) / len(PASSES))
            for name, time in times.items():
                milliseconds.setdefault(f"{name}, {title}", []).append(1e3 * time)
                if name != "formula":
                    found[name, title, n] = times["formula"] / time
    return found, milliseconds, error


def judge(measured: Iterable[tuple[float, float]]) -> str:
    """Returns the verdict from the two measurements of each ratio.

    A ratio with a measurement within a tenth of a bound, or with a bound between its measurements,
    decides nothing.
    """
    low, high = CLAIMED
    ranges = [(min(pair) / (1 + MARGIN), max(pair) * (1 + MARGIN)) for pair in measured]
    inside = [low <= lowest and highest <= high for lowest, highest in ranges]
    outside = [highest < low or lowest > high for lowest, highest in ranges]
    if all(inside):
        return "right"
    if all(outside):
        return "wrong"
    return "incomplete" if any(inside) and any(outside) else "undecided"


def listed(found: dict[Key, float], title: str) -> str:
    """Formats the ratios of a pass: for each kernel, the ratios by length."""
    kernels = dict.fromkeys(name for name, *_ in found)
    texts = {
        name: " / ".join(f"{ratio:.1f}" for key, ratio in found.items() if key[:2] == (name, title))
        for name in kernels
    }
    return f"{title}: " + ", ".join(f"{name} {text}" for name, text in texts.items())


def measure(lengths: tuple[int, ...] = (512, 1024, 4096), seconds: float = 24.0) -> Finding:
    first, _, _ = ratios(lengths, seconds)
    found, milliseconds, error = ratios(lengths, seconds)
    pairs = {", ".join(map(str, key)): (first[key], ratio) for key, ratio in found.items()}
    least, most = min(map(min, pairs.values())), max(map(max, pairs.values()))
    return Finding(
        claim="FlashAttention is 2 to 4 times as fast",
        verdict=judge(pairs.values()),
        measured=f"on a CPU with {torch.get_num_threads()} threads, the formula's time divided by that of a "
        f"tiled kernel, for {' / '.join(f'{n:,}' for n in lengths)} tokens: "
        + "; ".join(listed(found, title) for title in PASSES),
        correct=f"the factor depends on kernel, length, pass and machine: here {least:.1f} to "
        f"{most:.1f}; the published factors are of GPUs; "
        f"the kernels' outputs differ from the formula's by {error:.0e} at most",
        numbers={
            "tokens": list(lengths),
            **{f"milliseconds, {name}": times for name, times in milliseconds.items()},
            "times as fast as the formula, measured twice": pairs,
            "largest error": error,
        },
    )
