"""How cost grows: a window is O(n), deriving a mask's spans costs little, long sequences fit in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import memory
from cases import CASES, Case, Inputs, causal, square
from measure import best_times, check
from peers import prepare

from regard import _native
from regard._problem import make

LONG = square("causal-100000", "causal, one head, 100,000 tokens", 100_000, Hq=1, Hkv=1, mask=causal)
MASKED = ("causal-2048-64", "window-4096", "documents-4096", "longformer-4096", "padded-512")
MIB = 2**20


@dataclass(frozen=True)
class Fact:
    claim: str
    measured: str
    asked: str = ""
    holds: bool | None = None


def linearity(seconds: float, short: int = 4096, times: int = 16, most: float = 1.15) -> Fact:
    """The time of a sequence `times` as long by `times` the time of the short one, masks included."""
    window = next(c for c in CASES if c.name == "window-4096")
    cases = {name: replace(window, Lq=L, Lk=L) for name, L in (("short", short), ("long", short * times))}
    inputs = {name: case.inputs() for name, case in cases.items()}
    for name, case in cases.items():
        check(case, inputs[name], prepare("regard", case, inputs[name])(), "regard")
    calls = {n: partial(_with_mask, cases[n], inputs[n]) for n in cases}
    best = best_times(calls, seconds)
    growth = best["long"] / (times * best["short"])
    measured = f"{1e3 * best['long']:.0f} ms = {growth:.2f} x {times} x {1e3 * best['short']:.1f} ms"
    claim = f"window of 256 at {short * times:,} tokens against {times} times {short:,}, mask included"
    return Fact(claim, measured, f"at most {most} x", growth <= most)


def _with_mask(case: Case, inputs: Inputs) -> object:
    return prepare("regard", case, inputs)()


def mask_overhead(case: Case, threads: int, seconds: float) -> Fact:
    """Deriving the spans of every panel, as the kernels do, as a share of the call's time on its threads."""
    inputs = case.inputs()
    problem = make(*inputs[:3], mask=case.make_mask(), **inputs.options)
    calls = {"spans": lambda: _native.cost(problem), "call": prepare("regard", case, inputs)}
    best = best_times(calls, seconds)
    share = best["spans"] / (threads * best["call"])
    measured = f"{1e6 * best['spans']:.0f} us, {share:.2%} of the call"
    return Fact(f"deriving the mask: {case.title}, {case.shape}", measured)


def long_context(threads: int, case: Case = LONG) -> Fact:
    """One causal call, its time and its peak memory."""
    inputs = case.inputs()
    call = prepare("regard", case, inputs)
    begin = perf_counter()
    out = call()
    took = perf_counter() - begin
    check(case, inputs, out, "regard")
    extra = dict(memory.measure([f"{case.name}:regard"], threads)).get(f"{case.name}:regard")
    scores = case.Lq * case.Lk * 4 / 2**30
    size = "" if extra is None else f", {extra / MIB:.0f} MiB beyond q, k, v"
    return Fact(case.title, f"{took:.1f} s{size} (the scores would be {scores:.0f} GiB)")
