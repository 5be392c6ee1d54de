"""`make bench`: compares Regard with PyTorch on this machine. RESULTS.md explains the columns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

import headlines
import memory
import report
import scaling
import torch
from cases import CASES, Case, Inputs, chosen
from checks import WrongResult, useful_flops, verify
from measure import Load, Machine, best_times, looked_again, machine
from peers import prepare, sdpa_path
from report import Row
from rich.progress import Progress
from scaling import Fact

Calls = dict[str, Callable[[], Any]]
BUSY = 0.1  # if other processes use a larger share of the CPUs, no files are written
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = report.console(options.markdown)
    if options.list:
        console.print("\n".join(f"{c.name:<18} {c.title}  ({c.shape})" for c in CASES), highlight=False)
        return 0
    torch.set_num_threads(options.threads)
    load = Load()
    with torch.no_grad(), Progress(console=console, transient=True) as progress:
        here = machine(options.threads, 3 if options.quick else 10)
        report.show_machine(console, here)
        rows, here = timed(options, here, progress)
        rows = with_memory(rows, options, progress)
        facts = [] if options.only else list(growth(options, progress))
    others = load.others()
    header = report.where(here, command(options), others)
    report.show(console, rows, facts, header)
    if options.markdown:
        print("\n\n".join([header, report.markdown_rows(rows), report.markdown_facts(facts)]))
    if not (options.quick or options.only):
        if others is not None and others > BUSY and not options.write:
            console.print(f"No files written: other processes took {others:.0%} of the CPUs. Or --write.")
        else:
            write(rows, facts, here, header)
    return 1 if any(r.fault for r in rows) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short timings, no FlexAttention, no files")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a case's name")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--write", action="store_true", help="write the files even if the machine was busy")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="for each case (default 4; 0.3 with --quick)")
    parser.add_argument("--shrink", type=int, metavar="L", help="cut cases to L tokens (implies --quick)")
    options = parser.parse_args(arguments)
    options.quick = options.quick or options.shrink is not None
    options.seconds = options.seconds or (0.3 if options.quick else 4.0)
    return options


def command(options: argparse.Namespace) -> str:
    extra = [] if options.threads == 2 else ["--threads", str(options.threads)]
    extra += ["--quick"] * options.quick + [f"--only {name}" for name in options.only]
    return "make bench" + (f' ARGS="{" ".join(extra)}"' if extra else "")


def timed(options: argparse.Namespace, here: Machine, progress: Progress) -> tuple[list[Row], Machine]:
    """Times the chosen cases. Returns the rows, and the machine with its peak FLOP/s."""
    cases = chosen(options.only)
    task = progress.add_task("timing", total=len(cases))
    rows = []
    for case in cases:
        progress.update(task, description=f"timing {case.title}")
        rows += measure_case(case.shrunk(options.shrink) if options.shrink else case, options)
        here = looked_again(here)
        progress.advance(task)
    return [replace(row, share=row.speed / here.fma[1]) for row in rows], here


def measure_case(case: Case, options: argparse.Namespace) -> list[Row]:
    """Times a case. Returns one row for each PyTorch path (peer)."""
    peers = [p for p in case.peers if not (options.quick and p == "flex")]
    inputs = case.inputs()
    calls, faults = ready(case, inputs, ["regard", *peers])
    best = best_times(calls, options.seconds)
    work = useful_flops(case, inputs) * (2 if case.dtype == torch.float64 else 1)

    def row(peer: str) -> Row:
        empty = Row(case.name, case.title, case.shape, peer, asked=case.asked.get(peer))
        fault = faults.get("regard") or faults.get(peer)
        if fault:
            return replace(empty, fault=fault)
        ours, theirs = best["regard"], best[peer]
        return replace(empty, ours=ours, theirs=theirs, speed=work / ours, note=remark(case, inputs, peer))

    return [row(peer) for peer in peers]


def ready(case: Case, inputs: Inputs, sides: list[str]) -> tuple[Calls, dict[str, str]]:
    """Runs the call of each side (Regard and its peers) once.

    Returns the calls with correct results, and the error messages of the other calls.
    """
    calls = {side: prepare(side, case, inputs) for side in sides}
    faults = {side: fault_of(case, inputs, side, call) for side, call in calls.items()}
    return {s: c for s, c in calls.items() if not faults[s]}, {s: f for s, f in faults.items() if f}


def fault_of(case: Case, inputs: Inputs, side: str, call: Callable[[], Any]) -> str:
    try:
        found = call()
        if side == "regard" or "dropout" not in inputs.options:
            verify(case, inputs, found, side)
    except (WrongResult, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def remark(case: Case, inputs: Inputs, peer: str) -> str:
    """Returns a note on how the peer's call differs from Regard's, or ""."""
    told = []
    if peer == "sdpa" and sdpa_path(case, inputs) == "math":
        told.append("SDPA has no fused CPU kernel here: math path")
    if "dropout" in inputs.options:
        told.append("SDPA draws its own dropout pattern, so its result is not checked")
    if "sink" in inputs.options:
        told.append("SDPA gets the sink as one more key, with the sink's logit as its bias")
    return "; ".join(told)


def with_memory(rows: list[Row], options: argparse.Namespace, progress: Progress) -> list[Row]:
    """Returns the rows with the measured peak memory of Regard and of the PyTorch path."""
    good = [r for r in rows if not r.fault]
    labels = list(dict.fromkeys(f"{r.name}:{side}" for r in good for side in ("regard", r.peer)))
    task = progress.add_task("memory", total=len(labels))
    found: dict[str, int] = {}
    for label, extra in memory.measure(labels, options.threads, options.shrink):
        found[label] = extra
        progress.advance(task)
    return [replace(r, memory=(found.get(f"{r.name}:regard"), found.get(f"{r.name}:{r.peer}"))) for r in rows]


def growth(options: argparse.Namespace, progress: Progress) -> Iterator[Fact]:
    """Yields the results of scaling.py: growth with length, time for mask spans, a long call."""
    if options.shrink:
        yield scaling.linearity(options.seconds, short=options.shrink, times=2)
        return
    task = progress.add_task("growth", total=len(scaling.masks_of(64)) + 2)
    yield scaling.linearity(5 * options.seconds)
    progress.advance(task)
    for fact in scaling.mask_overheads(options.seconds / 4):
        yield fact
        progress.advance(task)
    if not options.quick:
        yield scaling.long_context(options.threads)


def write(rows: Sequence[Row], facts: Sequence[Fact], here: Machine, header: str) -> None:
    """Writes RESULTS.md, the two charts, and the table of docs/benchmarks.md."""
    (HERE / "RESULTS.md").write_text(report.results_page(rows, facts, header), encoding="utf-8")
    about = ", ".join(here.facts[name] for name in ("CPU", "threads", "torch", "date"))
    report.chart(rows, HERE / "results.png", about)
    headlines.main(HERE / "RESULTS.md")
    report.insert(PAGE, f"{report.short_table(rows)}\n\n{fill(header, 100, break_on_hyphens=False)}")


if __name__ == "__main__":
    sys.exit(main())
