"""Compares the times that `regard.cost.predict` predicts with measured times.

`python benchmarks/cost.py` measures the machine's FLOP/s, read bandwidth and time of a tiny call,
predicts and runs all cases of `cases.py`, and fails if a prediction is off by more than 25 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import command
import torch
from cases import Case, chosen
from measure import best_times
from peers import prepare
from report import milliseconds
from torch import Tensor

from regard import cost

ALLOWED = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 2.0, "case")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a case's name")
    parser.add_argument("--shrink", type=int, metavar="L", help="cut cases to L tokens and never fail")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    machine = cost.measure_machine(options.threads)
    print("| case | predicted | measured | predicted / measured |\n|---|---:|---:|---:|")
    ratios = {case.name: row(case, machine, options) for case in chosen(options.only)}
    read = ", ".join(f"{rate / 1e9:.0f} GB/s of {size >> 20} MiB" for size, rate in machine.read)
    limits = f"{machine.fma / 1e9:.0f} GFLOP/s, {read}, {machine.call * 1e6:.1f} us per call"
    print(session.closing(limits))
    off = [name for name, ratio in ratios.items() if abs(ratio - 1) > ALLOWED]
    print(
        f"{len(ratios) - len(off)} of {len(ratios)} within {ALLOWED:.0%}" + "".join(f"\n- {n}" for n in off)
    )
    return 1 if off and not options.shrink else 0


def row(case: Case, machine: cost.Machine, options: argparse.Namespace) -> float:
    case = case.shrunk(options.shrink) if options.shrink else case
    passes: Any = case.work
    predicted = case.calls * cost.predict(call_of(case), machine, passes)
    with torch.no_grad():
        run = prepare("regard", case, case.inputs())
        measured = best_times({"regard": run}, options.seconds)["regard"]
    ratio = predicted / measured
    print(f"| {case.name} | {milliseconds(predicted)} | {milliseconds(measured)} | {ratio:.2f} |", flush=True)
    return ratio


def call_of(case: Case) -> cost.CallSpec:
    bias = case.inputs().options.get("bias")
    return cost.CallSpec(
        case.B, case.Hq, case.Lq, case.D, case.Hkv, case.Lk, case.Dv, case.dtype, case.make_mask(),
        tuple(bias.shape) if isinstance(bias, Tensor) else None,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
