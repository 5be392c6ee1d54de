"""Searches for shapes and options where PyTorch is faster.

`python benchmarks/hunt.py --count 300` times random calls that SDPA's fused CPU kernel supports.
Calls in which Regard is slower than SDPA are timed again for longer. Calls in which Regard stays
slower are listed, the slowest first.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence

import torch
from cases import Case, Options, causal, lengths
from checks import check
from measure import best_times
from peers import prepare, sdpa_path
from report import milliseconds
from rich.console import Console
from rich.progress import track
from rich.table import Table

MOST_WORK = 2**32  # limit of B * Hq * Lq * Lk * (D + Dv): about 0.1 s on two cores
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
WIDTHS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.15, help="per call")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    with torch.no_grad():
        slower = list(slower_cases(options, console))
    show(console, slower, options.count)
    return 0


def slower_cases(options: argparse.Namespace, console: Console) -> Iterator[tuple[Case, float, float]]:
    """Yields (case, Regard's time, PyTorch's time) if PyTorch is faster in both measurements."""
    cases = random_cases(random.Random(options.seed), options.count)
    for case in track(list(cases), "hunting", console=console, transient=True):
        inputs = case.inputs()
        calls = {side: prepare(side, case, inputs) for side in ("regard", "sdpa")}
        check(case, inputs, calls["regard"](), "regard")
        for seconds in (options.seconds, 8 * options.seconds):
            best = best_times(calls, seconds)
            if best["regard"] <= best["sdpa"]:
                break
        else:
            yield case, best["regard"], best["sdpa"]


def random_cases(chance: random.Random, count: int) -> Iterator[Case]:
    """Yields `count` cases that SDPA's fused kernel supports.

    Each case has at most MOST_WORK multiplications.
    """
    while count:
        case = random_case(chance)
        work = case.B * case.Hq * case.Lq * case.Lk * 2 * case.D
        if work <= MOST_WORK and sdpa_path(case, case.inputs()) == "fused":
            count -= 1
            yield case


def random_case(chance: random.Random) -> Case:
    kind = chance.choice(("dense", "dense", "causal", "causal", "cross", "decode", "padded", "bias"))
    Hq = chance.choice(HEADS)
    Hkv = chance.choice([Hq, Hq, *(h for h in HEADS if Hq % h == 0)])
    Lk = length(chance)
    Lq = {"cross": length(chance), "decode": 1}.get(kind, Lk)
    B, D = chance.choice((1, 1, 1, 2, 4, 8)), chance.choice(WIDTHS)
    dtype = chance.choice((torch.float32,) * 5 + (torch.bfloat16, torch.float16, torch.float64))
    mask = {"causal": causal, "padded": lengths}.get(kind)
    strided = chance.random() < 0.25
    name = f"{kind} {str(dtype).removeprefix('torch.')}" + " strided" * strided
    return Case(
        name, name, B, Hq, Hkv, Lq, Lk, D, D, dtype, mask, bias if kind == "bias" else None, strided=strided
    )


def length(chance: random.Random) -> int:
    """Draws a log-uniform length from 1 to 8192. Half of all lengths are powers of two."""
    exponent = chance.uniform(0, 13)
    return 2 ** round(exponent) if chance.random() < 0.5 else int(2**exponent)


def bias(case: Case) -> Options:
    generator = torch.Generator().manual_seed(2)
    return {"bias": torch.randn(case.Lq, case.Lk, generator=generator).to(case.dtype)}


def show(console: Console, slower: list[tuple[Case, float, float]], count: int) -> None:
    table = Table("call", "B, Hq/Hkv, L, D", "Regard", "SDPA", "ratio", title_justify="left")
    for case, ours, theirs in sorted(slower, key=lambda times: times[2] / times[1]):
        table.add_row(case.name, case.shape, milliseconds(ours), milliseconds(theirs), f"{theirs / ours:.2f}")
    if slower:
        console.print(table)
    console.print(f"PyTorch was faster in {len(slower)} of {count} calls.")


if __name__ == "__main__":
    sys.exit(main())
