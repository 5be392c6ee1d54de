"""Searches for shapes, dtypes and options where PyTorch is faster.

`python benchmarks/hunt.py` times 2,000 random calls, forward and training, with 1 and 2 threads, and
the fastest of SDPA's forms of each call. Calls in which SDPA is faster are timed again for longer,
with new tensors. Calls in which SDPA stays faster by more than 5 % are listed, the slowest first.
`--first` and `--count` select a part of the calls of a seed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from cases import Case, Inputs, Options, causal, dropout, lengths, window
from checks import verify
from measure import best_times
from peers import Call, gradients, prepare, sdpa_options
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

LIMIT = 1.05
ROUNDS = (1, 4, 12)  # times the seconds per call
MOST_WORK = 2**30  # limit of B * Hq * Lq * Lk * (D + Dv) * (3 if training): about 30 ms on two cores
MOST_NUMBERS = 2**24  # in the keys
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
WIDTHS = (8, 16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256)
KINDS = {
    "dense": 4, "causal": 4, "cross": 3, "decode": 3, "few queries": 3, "padded": 2, "bias": 2, "window": 1,
    "dropout": 1,
}  # fmt: skip
MASKS = {"causal": causal, "padded": lengths, "window": window}
# Calls that are timed, but do not count: reason -> condition
EXCEPTIONS: dict[str, Callable[[Case], bool]] = {
    "bfloat16 with more than 16 queries (PyTorch multiplies pairs of bfloat16)": lambda case: (
        case.dtype is torch.bfloat16 and case.Lq > 16
    ),
}
NOT_DRAWN = "softcap, sinks, ALiBi, relative biases, documents (SDPA lacks them); caches; other devices"


@dataclass(frozen=True)
class Result:
    case: Case
    threads: int
    times: dict[str, float]  # best seconds of "regard" and "sdpa"

    @property
    def ratio(self) -> float:
        """PyTorch's time divided by Regard's. Below 1, PyTorch is faster."""
        return self.times["sdpa"] / self.times["regard"]

    @property
    def exception(self) -> str | None:
        return next((reason for reason, applies in EXCEPTIONS.items() if applies(self.case)), None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of calls to skip")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="taken in turn")
    parser.add_argument("--seconds", type=float, default=0.05, help="per call in the first round")
    options = parser.parse_args(arguments)
    console = Console()
    results = list(hunt(options, console))
    return show(console, results)


def hunt(options: argparse.Namespace, console: Console) -> Iterator[Result]:
    cases = list(random_cases(random.Random(options.seed), options.first + options.count))
    for index, case in enumerate(track(cases[options.first :], "hunting", console=console, transient=True)):
        threads = options.threads[(options.first + index) % len(options.threads)]
        torch.set_num_threads(threads)
        with torch.set_grad_enabled(case.work != "forward"):
            yield compare(case, threads, options.seconds)


def compare(case: Case, threads: int, seconds: float) -> Result:
    """Times a case. Repeats it for longer while PyTorch is faster by more than the limit."""
    for factor in ROUNDS:
        inputs = case.inputs()
        call = prepare("regard", case, inputs)
        verify(case, inputs, call(), "regard")
        calls = {"regard": call, "sdpa": fastest(sdpa_forms(case, inputs), seconds)}
        result = Result(case, threads, best_times(calls, factor * seconds))
        if result.ratio * LIMIT >= 1:
            break
    return result


def sdpa_forms(case: Case, inputs: Inputs) -> list[Call]:
    """Returns SDPA's calls that compute the case: float or bool mask, shared or repeated heads."""
    q, k, v, given = inputs
    options, mask = sdpa_options(case, inputs), case.make_mask()
    variants = [options]
    if mask is not None and options["attn_mask"] is not None and "bias" not in given:
        variants.append(options | {"attn_mask": mask.to_dense(case.Lq, case.Lk)})
    calls: list[Call] = [partial(F.scaled_dot_product_attention, q, k, v, **o) for o in variants]
    if case.Hq != case.Hkv:
        calls += [partial(repeated_heads, q, k, v, **o | {"enable_gqa": False}) for o in variants]
    return calls if case.work == "forward" else [gradients(case, inputs, call) for call in calls]


def repeated_heads(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]


def fastest(calls: list[Call], seconds: float) -> Call:
    if len(calls) == 1:
        return calls[0]
    best = best_times({str(i): call for i, call in enumerate(calls)}, seconds / 2)
    return calls[int(min(best, key=best.__getitem__))]


# Cases


def random_cases(chance: random.Random, count: int) -> Iterator[Case]:
    """Yields `count` different cases of at most MOST_WORK multiplications."""
    drawn: set[Case] = set()
    while len(drawn) < count:
        case = random_case(chance)
        passes = 1 if case.work == "forward" else 3
        work = case.B * case.Hq * case.Lq * case.Lk * (case.D + case.Dv) * passes
        numbers = case.B * case.Hkv * case.Lk * (case.D + case.Dv)
        if work <= MOST_WORK and numbers <= MOST_NUMBERS and case not in drawn:
            drawn.add(case)
            yield case


def random_case(chance: random.Random) -> Case:
    kind = chance.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    work = "training" if kind == "dropout" or chance.random() < 0.3 else "forward"
    Hq = chance.choice(HEADS)
    Hkv = chance.choice([Hq, Hq, *(h for h in HEADS if Hq % h == 0)])
    # In training, few keys have gradients near 0, whose relative error says nothing.
    Lk, D = max(length(chance), 8 if work == "training" else 1), width(chance)
    Lq = {"cross": length(chance), "decode": 1, "few queries": chance.randint(1, 16)}.get(kind, Lk)
    B, Dv = chance.choice((1, 1, 1, 2, 4, 8)), D if chance.random() < 0.85 else width(chance)
    dtype = chance.choice((torch.float32,) * 5 + (torch.bfloat16, torch.float16, torch.float64))
    strided = chance.random() < 0.25
    name = f"{kind} {str(dtype).removeprefix('torch.')} {work}" + " strided" * strided
    return Case(
        name, name, B, Hq, Hkv, Lq, Lk, D, Dv, dtype, MASKS.get(kind),
        {"bias": bias, "dropout": dropout}.get(kind), work=work, strided=strided,
    )  # fmt: skip


def length(chance: random.Random) -> int:
    """Draws a log-uniform length from 1 to 4096. Half of all lengths are powers of two."""
    exponent = chance.uniform(0, 12)
    return 2 ** round(exponent) if chance.random() < 0.5 else int(2**exponent)


def width(chance: random.Random) -> int:
    return chance.choice(WIDTHS) if chance.random() < 0.85 else chance.randint(8, 256)


def bias(case: Case) -> Options:
    generator = torch.Generator().manual_seed(2)
    return {"bias": torch.randn(case.Lq, case.Lk, generator=generator).to(case.dtype)}


# Showing


def show(console: Console, results: list[Result]) -> int:
    """Prints the calls in which PyTorch is faster. Returns 1 if one of them is not an exception."""
    slower = sorted((r for r in results if r.ratio * LIMIT < 1), key=lambda r: r.ratio)
    faults = [r for r in slower if r.exception is None]
    table = Table("call", "B, Hq/Hkv, L, D", "threads", "Regard", "SDPA", "ratio")
    for r in slower:
        times = (f"{1e6 * r.times[side]:.1f} us" for side in ("regard", "sdpa"))
        mark = "" if r.exception is None else " (exception)"
        table.add_row(r.case.name + mark, r.case.shape, str(r.threads), *times, f"{r.ratio:.2f}")
    if slower:
        console.print(table)
    counts, lost = (Counter(r.exception for r in rs if r.exception) for rs in (results, slower))
    for reason in EXCEPTIONS:
        console.print(f"Exception: {reason}: PyTorch was faster in {lost[reason]} of {counts[reason]} calls.")
    console.print(f"Not drawn: {NOT_DRAWN}.")
    total = len(results) - sum(counts.values())
    console.print(f"PyTorch was faster in {len(faults)} of {total} calls, by more than {LIMIT - 1:.0%}.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
