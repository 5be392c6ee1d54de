"""Measures scaling: time with a window, time to find mask spans, memory of long sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import memory
import torch
from cases import CASES, Case, Inputs, causal, square
from checks import check
from measure import best_times
from peers import prepare

from regard import masks as M
from regard._backends.native import attention as _native
from regard._call.make import make
from regard._call.spec import Options
from regard.masks import Mask

LONG = square("causal-100000", "causal, one head, 100,000 tokens", 100_000, Hq=1, Hkv=1, mask=causal)
MIB = 2**20


@dataclass(frozen=True)
class Fact:
    """A claim, its measurement and its limit. `holds` is None if nothing could be measured."""

    claim: str
    measured: str
    asked: str = ""
    holds: bool | None = None


def linearity(seconds: float, short: int = 4096, times: int = 16, most: float = 1.15) -> Fact:
    """Measures T(short * times) / (times * T(short)), where T(n) is the time of a call with n tokens.

    The call has a window, so T should grow linearly and the quotient should be about 1.
    """
    window = next(c for c in CASES if c.name == "window-4096")
    cases = {name: replace(window, Lq=L, Lk=L) for name, L in (("short", short), ("long", short * times))}
    inputs = {name: case.inputs() for name, case in cases.items()}
    for name, case in cases.items():
        check(case, inputs[name], prepare("regard", case, inputs[name])(), "regard")
    calls = {n: partial(_with_mask, cases[n], inputs[n]) for n in cases}
    best = best_times(calls, seconds)
    growth = best["long"] / (times * best["short"])
    measured = f"{1e3 * best['long']:.0f} ms / ({times} x {1e3 * best['short']:.1f} ms) = {growth:.2f}"
    times_short = f"{times} times the time of {short:,} tokens"
    claim = f"window of 256, mask included: time of {short * times:,} tokens / {times_short}"
    return Fact(claim, measured, f"at most {most}", growth <= most)


def _with_mask(case: Case, inputs: Inputs) -> object:
    return prepare("regard", case, inputs)()


def masks_of(L: int) -> dict[str, Mask]:
    """Returns a mask of every kind except Dense, by name."""
    ids = torch.arange(3).repeat_interleave(torch.tensor([L // 3, L // 3, L - 2 * (L // 3)]))
    table = torch.rand(-(-L // 64), -(-L // 64), generator=torch.Generator().manual_seed(0)) < 0.2
    return {
        "Causal()": M.Causal(),
        "sliding(256)": M.sliding(256),
        "Lengths": M.Lengths(L - L // 5),
        "Documents & Causal": M.Documents(ids) & M.Causal(),
        "Prefix | Causal": M.Prefix(L // 8) | M.Causal(),
        "longformer": M.longformer((128, 128), [0, 1, 2, L // 2]),
        "bigbird": M.bigbird(64),
        "Blocks": M.Blocks(table, 64),
        "Window & Dilated": M.Window(1023, 0) & M.Dilated(4),
        "PerHead of windows": M.PerHead([M.Window(64 * (h + 1), 0) for h in range(8)]),
        "~Window": ~M.Window(255, 255),
    }


def mask_overheads(seconds: float, L: int = 4096, most: float = 0.01) -> Iterator[Fact]:
    """Measures how long one thread takes to find a mask's key spans.

    Reports this time in microseconds and as a fraction of the call's time.
    """
    q, k, v = (torch.randn(1, 8, L, 64) for _ in range(3))
    unmasked = make(q, k, v)  # baseline: `cost` without spans to find
    for name, mask in masks_of(L).items():
        problem = make(q, k, v, Options(mask=mask))
        costs = {"spans": partial(_native.cost, problem), "unmasked": partial(_native.cost, unmasked)}
        best = best_times({**costs, "call": partial(_native.forward, problem)}, seconds)
        spans = best["spans"] - best["unmasked"]
        share = spans / best["call"]
        measured = f"{1e6 * spans:.0f} us, {share:.2%} of {1e3 * best['call']:.1f} ms"
        yield Fact(f"finding spans of {name}, 1, 8/8, {L}, 64", measured, f"under {most:.0%}", share < most)


def long_context(threads: int, case: Case = LONG) -> Fact:
    """Measures the time and the peak memory of one long causal call."""
    inputs = case.inputs()
    call = prepare("regard", case, inputs)
    begin = perf_counter()
    out = call()
    seconds = perf_counter() - begin
    check(case, inputs, out, "regard")
    extra = dict(memory.measure([f"{case.name}:regard"], threads)).get(f"{case.name}:regard")
    scores = case.Lq * case.Lk * 4 / 2**30
    size = "" if extra is None else f", {extra / MIB:.0f} MiB beyond q, k, v"
    measured = f"{seconds:.1f} s{size} (the scores would be {scores:.0f} GiB)"
    return Fact(case.title, measured, "under 300 MB", None if extra is None else extra < 300e6)
