"""Prints benchmark results as tables (terminal or Markdown) and draws them as a bar chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Machine
from peers import NAMES
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from scaling import Fact

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
# Blue and orange from the palette of Okabe and Ito, which colour-blind people can distinguish.
BLUE, ORANGE, GREY, INK = "#0072b2", "#e69f00", "#999999", "#33312c"


@dataclass(frozen=True)
class Row:
    """The times of Regard and of one PyTorch path (peer) in a case, or a fault instead of times."""

    name: str
    title: str
    shape: str
    peer: str
    ours: float = 0.0  # seconds
    theirs: float = 0.0
    speed: float = 0.0  # useful FLOP/s; in float64 doubled, because the peak is half
    share: float = 0.0  # speed divided by the machine's peak
    asked: float | None = None
    memory: tuple[int | None, int | None] = (None, None)
    note: str = ""
    fault: str = ""

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours

    @property
    def falls_short(self) -> bool:
        return not self.fault and self.asked is not None and self.ratio < self.asked


def milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f}" if size >= 10 * 2**20 else f"{size / 2**20:.1f}"


# Terminal


def console(to_stderr: bool = False) -> Console:
    """Returns a console as wide as the terminal. Without a terminal, it is 140 columns wide."""
    found = Console(stderr=to_stderr)
    return found if found.is_terminal else Console(stderr=to_stderr, width=140)


def show_machine(console: Console, machine: Machine) -> None:
    for name, text in machine.facts.items():
        console.print(f"[dim]{name:<8}[/] {text}", highlight=False)
    console.print(limits(machine), highlight=False)


def limits(machine: Machine) -> str:
    fma, read = ([f"{x / 1e9:.0f}" for x in pair] for pair in (machine.fma, machine.read))
    return (
        f"Measured limits with 1 and {machine.threads} threads: "
        f"{' and '.join(fma)} GFLOP/s of multiply-adds, {' and '.join(read)} GB/s of reading."
    )


def show(console: Console, rows: Sequence[Row], facts: Sequence[Fact], header: str) -> None:
    show_rows(console, rows)
    if facts:
        show_facts(console, facts)
    console.print(f"[dim]{header}[/]", highlight=False)


def show_rows(console: Console, rows: Sequence[Row]) -> None:
    titles = ("case", "B, H/Hkv, L, D", "peer", "Regard", "peer", "ratio", "asked", "of peak", "memory, MiB")
    left_out = () if console.width >= 118 else (1, 6, 7)
    table = Table(title="The peer's time by Regard's (above 1: Regard is faster)", box=SIMPLE_HEAD)
    for i, name in enumerate(titles):
        if i not in left_out:
            table.add_column(name, justify="left" if i < 3 else "right", no_wrap=i > 0)
    for row in rows:
        texts = [*cells(row), "/".join(filter(None, map(mebibytes, row.memory)))]
        style = "red" if row.fault or row.falls_short else None
        table.add_row(*(text for i, text in enumerate(texts) if i not in left_out), style=style)
    console.print(table)
    for text in dict.fromkeys(f"{r.title}: {note(r)}" for r in rows if note(r)):
        console.print(f"[dim]{text}[/]", highlight=False)


def cells(row: Row) -> list[str]:
    named = [row.title, row.shape, NAMES[row.peer]]
    if row.fault:
        return [*named, "refused", "", "", "", ""]
    asked = "" if row.asked is None else f"{row.asked:g}"
    times = milliseconds(row.ours), milliseconds(row.theirs)
    return [*named, *times, f"{row.ratio:.2f}", asked, f"{row.share:.0%}"]


def show_facts(console: Console, found: Sequence[Fact]) -> None:
    table = Table("claim", "measured", "asked", title="Growth", box=SIMPLE_HEAD)
    for fact in found:
        table.add_row(fact.claim, fact.measured, fact.asked, style="red" if fact.holds is False else None)
    console.print(table)


# Markdown


def markdown_rows(rows: Sequence[Row]) -> str:
    head = ("case", "B, H/Hkv, L, D", "peer", "Regard", "peer's time", "ratio", "asked", "of peak")
    lines = [[*cells(r), *map(mebibytes, r.memory), note(r)] for r in rows]
    return table((*head, "MiB", "peer's MiB", "note"), lines, right=range(3, 10))


def note(row: Row) -> str:
    return row.fault or row.note


def markdown_facts(found: Sequence[Fact]) -> str:
    return table(("claim", "measured", "asked"), [[f.claim, f.measured, f.asked] for f in found])


# The cases of the short table in docs/benchmarks.md. They include those with the smallest ratios.
HEADLINES = (
    "dense-2048-64", "dense-2048-128", "causal-2048-64", "window-4096", "documents-4096", "padded-512",
    "dropout-1024", "softcap-1024", "bf16-2048", "fp16-1024", "tiny-calls",
    "decode-fp32-1-8-4096", "decode-bf16-1-8-4096",
    "train-dense-1024", "train-causal-1024", "train-window-4096", "train-dropout-1024", "train-bias-1024",
    "train-bf16-1024",
)  # fmt: skip


def short_table(rows: Sequence[Row]) -> str:
    """Returns the Markdown table of docs/benchmarks.md."""
    head = ("case", "B, H/Hkv, L, D", "Regard", "PyTorch", "PyTorch path", "faster")
    lines = [
        [r.title, r.shape, *cells(r)[3:5], _path(r), f"{r.ratio:.1f} x", *map(mebibytes, r.memory)]
        for r in rows
        if not r.fault and r.name in HEADLINES
    ]
    return table((*head, "MiB, Regard", "MiB, PyTorch"), lines, right=(2, 3, 5, 6, 7))


def _path(row: Row) -> str:
    return NAMES[row.peer] + (", not fused" if "math path" in row.note else "")


def table(head: Sequence[str], lines: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    marks = ["---:" if i in set(right) else "---" for i in range(len(head))]
    rows = [head, marks, *lines]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows)


def where(machine: Machine, command: str, others: float | None) -> str:
    facts = "; ".join(f"{name}: {text}" for name, text in machine.facts.items())
    busy = "" if others is None else f" During the run, other processes used {others:.0%} of the CPUs."
    return f"`{command}`; {facts}. {limits(machine)}{busy}"


EXPLAINED = """\
Each row compares Regard with one PyTorch implementation, the *peer*. The calls of both alternate in
one process, and the shortest time of each counts. Every result is first checked against the float64
reference; a wrong result gets no time. Masks are built before timing. SDPA gets masks as float
tensors, which it processes faster than bool tensors.

- *H/Hkv*: numbers of query heads and key heads. *1/4096* as L: one query and 4096 keys.
- *ratio*: the peer's time divided by Regard's time. Above 1, Regard is faster. *asked*: the target
  for this ratio.
- *of peak*: Regard's FLOP/s, counting only query-key pairs that the mask allows, as a share of the
  multiply-add limit above (of half of this limit for float64).
- *MiB*, *peer's MiB*: peak memory of Regard and of the peer beyond q, k and v: mask, result and all
  temporaries. It is measured in a separate process.
- *math path*: SDPA has no fused CPU kernel for the call."""

GROWTH = """\
*Finding spans* is the time that one thread takes to find the ranges of keys that a mask allows, in
seconds and as a fraction of the time of the attention call."""


def results_page(rows: Sequence[Row], found: Sequence[Fact], header: str) -> str:
    parts = ["# Results", header, "![ratios](results.png)", EXPLAINED, markdown_rows(rows)]
    return "\n\n".join([*parts, "## Growth", GROWTH, markdown_facts(found)]) + "\n"


def insert(page: Path, text: str) -> None:
    """Replaces the text between the marker lines BEGIN and END of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{page.name}: expected the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


# Chart


def chart(rows: Sequence[Row], path: Path, header: str) -> None:
    """Draws each row's speedup over PyTorch as a bar on a logarithmic axis. Lines mark targets."""
    from matplotlib.figure import Figure

    rows = [r for r in rows if not r.fault][::-1]
    figure = Figure(figsize=(9, 1.3 + 0.3 * len(rows)), layout="constrained", facecolor="white")
    axes = figure.subplots()
    colours = [{"sdpa": BLUE, "flex": ORANGE}.get(r.peer, GREY) for r in rows]
    axes.barh(range(len(rows)), [r.ratio - 1 for r in rows], left=1, color=colours, height=0.68)
    for y, row in enumerate(rows):
        axes.text(
            max(row.ratio, row.asked or 1, 1) * 1.05,
            y,
            f"{row.ratio:.2f}",
            va="center",
            fontsize=8,
            color=INK,
        )
        if row.asked is not None:
            axes.plot([row.asked] * 2, [y - 0.4, y + 0.4], color=INK, linewidth=2)
    axes.set_yticks(range(len(rows)), [f"{r.title}  ({r.shape})" for r in rows], fontsize=8)
    _dress(axes, max((r.ratio for r in rows), default=1.0), header)
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _dress(axes: Any, most: float, header: str) -> None:
    from matplotlib.patches import Patch

    axes.set_xscale("log")
    axes.set_xlim(0.6, max(2.0, most) * 1.5)
    axes.margins(y=0.01)
    ticks = [t for t in (0.7, 1, 1.5, 2, 3, 5, 10, 20, 50) if t < most * 1.5]
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axes.xaxis.set_minor_locator(_none())
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xlabel("how many times faster than PyTorch (upright line: asked)", color=INK, fontsize=9)
    axes.set_title(header, fontsize=8, color=INK, loc="left")
    names = (BLUE, "beside SDPA"), (ORANGE, "beside FlexAttention, compiled"), (GREY, "beside plain PyTorch")
    patches = [Patch(color=colour, label=name) for colour, name in names]
    axes.legend(handles=patches, loc="lower right", fontsize=8, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, length=0)


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
