"""The results of `make bench-peers`: lines for the terminal, and the tables of docs/peers.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import report
from cases import ENGINE_CASES
from engines import ENGINES
from install import HOME
from measure import Load, facts, instruction_sets
from rich.console import Console

PAGE = Path(__file__).resolve().parent.parent / "docs" / "peers.md"
STORE = HOME / "results.json"
CLEAR = 0.97  # an engine with a smaller ratio is called faster
CASES = {case.name: case for case in ENGINE_CASES}


class Result(NamedTuple):
    """The seconds of one engine's calls in a case, or what is wrong."""

    best: float = 0.0
    median: float = 0.0
    fault: str = ""


class Row(NamedTuple):
    """The results of the engines that can run a case, by name."""

    name: str
    results: Mapping[str, Result]

    def ratio(self, engine: str) -> tuple[float, float] | None:
        """Returns the ratios of the engine's best and median time to Regard's.

        Below 1, the engine is faster. Returns None without a time of both.
        """
        ours, theirs = self.results["regard"], self.results.get(engine, Result(fault="not run"))
        if ours.fault or theirs.fault:
            return None
        return theirs.best / ours.best, theirs.median / ours.median


# Terminal


def show(console: Console, row: Row) -> None:
    """Prints a line for each engine: the best and the median time, and their ratios to Regard's."""
    case = CASES[row.name]
    console.print(f"[bold]{case.title}[/] ({case.shape}), {row.name}", highlight=False)
    for name, result in row.results.items():
        console.print(f"  {ENGINES[name].title:<24}{line(row, name, result)}", highlight=False)


def line(row: Row, name: str, result: Result) -> str:
    if result.fault:
        return f"[red]{result.fault}[/]"
    times = f"{duration(result.best):>10}{duration(result.median):>10}"
    ratio = row.ratio(name)
    return times if ratio is None else f"{times}{ratio[0]:>8.2f}{ratio[1]:>8.2f}"


def duration(seconds: float) -> str:
    return report.milliseconds(seconds) if seconds >= 1e-4 else f"{1e6 * seconds:.1f} us"


def header(options: argparse.Namespace, load: Load) -> str:
    """Returns a sentence that names the command, the machine and the load of other processes."""
    installed = facts(options.threads) | {"instruction sets": " ".join(instruction_sets())}
    told = "; ".join(f"{name}: {text}" for name, text in installed.items())
    extra = f"pages of {options.pages}iB; {options.rounds} rounds of {options.seconds:g} s"
    others = load.others()
    busy = "" if others is None else f" Other processes used {others:.0%} of the CPUs."
    return f"{told}; {extra}.{busy}"


# Page


@dataclass(frozen=True)
class Standings:
    """What docs/peers.md shows. The cases may come from several runs."""

    rows: dict[str, Row]
    versions: dict[str, str]  # of the engines that were installed
    missing: dict[str, str]  # engine -> why it is not installed
    header: str

    @classmethod
    def load(cls, store: Path) -> Standings:
        if not store.exists():
            return cls({}, {}, {}, "")
        fields = json.loads(store.read_text(encoding="utf-8"))
        rows = {
            name: Row(name, {engine: Result(*values) for engine, values in results.items()})
            for name, (_, results) in fields.pop("rows").items()
        }
        return cls(rows, **fields)

    def updated(self, new: Standings) -> Standings:
        """Returns these standings with the cases and engines of a new run replaced."""
        old = {name: text for name, text in self.missing.items() if name not in new.versions}
        return Standings(self.rows | new.rows, self.versions | new.versions, old | new.missing, new.header)

    def save(self, store: Path) -> None:
        store.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def page(self) -> str:
        """Returns the tables and lists of docs/peers.md."""
        rows = [self.rows[name] for name in CASES if name in self.rows]
        parts = {
            "Ratios": self.table(rows, ratios),
            "Where an engine is faster": "\n".join(faster(rows)) or "In no case.",
            "Times": self.table(rows, times),
            "Engines": "\n".join(self.engines(rows)),
            "Machine": fill(self.header, 100, break_on_hyphens=False),
        }
        return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items())

    def table(self, rows: Sequence[Row], cell: Callable[[Row, str], str]) -> str:
        names = [name for name in ENGINES if any(name in row.results for row in rows)]
        head = ["case", "B, H/Hkv, L, D", *(ENGINES[name].title for name in names)]
        lines = [
            [CASES[row.name].title, CASES[row.name].shape, *(cell(row, name) for name in names)]
            for row in rows
        ]
        return report.table(head, lines, right=range(2, len(head)))

    def engines(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yields a line for each engine: version, how it is called, what it cannot do, what failed."""
        for name, engine in ENGINES.items():
            state = self.versions.get(name, "") or self.missing.get(name, "")
            reasons = dict.fromkeys(filter(None, map(engine.reason, ENGINE_CASES)))
            faults = [
                f"{CASES[row.name].title}: {row.results[name].fault}"
                for row in rows
                if name in row.results and row.results[name].fault
            ]
            limits = f" Limits: {'; '.join([*reasons, *faults])}." if reasons or faults else ""
            text = f"- **{engine.title}** {state}: {engine.note}{limits}".replace("** :", "**:")
            yield fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)


def ratios(row: Row, name: str) -> str:
    """Returns Regard's best time, or the ratios of another engine's times. Bold: clearly below 1."""
    ratio = row.ratio(name)
    if ratio is None:
        return absence(row, name)
    if name == "regard":
        return duration(row.results[name].best)
    text = f"{ratio[0]:.2f}, {ratio[1]:.2f}"
    return f"**{text}**" if ENGINES[name].attends and min(ratio) < CLEAR else text


def times(row: Row, name: str) -> str:
    result = row.results.get(name)
    if result is None or result.fault:
        return absence(row, name)
    return f"{duration(result.best)}, {duration(result.median)}"


def absence(row: Row, name: str) -> str:
    """Returns why a cell has no time, in a word: "-" for a case that the engine cannot run."""
    result = row.results.get(name)
    return "-" if result is None else result.fault.split(":")[0] or "not compared"


def faster(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each case in which an engine is clearly faster than Regard."""
    for row in rows:
        names = [name for name in row.results if ratios(row, name).startswith("**")]
        if names:
            told = ", ".join(f"{ENGINES[name].title} ({ratios(row, name).strip('*')})" for name in names)
            yield f"- {CASES[row.name].title}, {CASES[row.name].shape}: {told}"


def write(new: Standings) -> None:
    """Adds a run to the stored results, and writes them all to docs/peers.md."""
    standings = Standings.load(STORE).updated(new)
    standings.save(STORE)
    report.insert(PAGE, standings.page())
