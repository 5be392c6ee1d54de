"""`make bench-against REF=<commit>`: this tree beside another commit, row by row, on this machine.

The other commit is built once into build/against/<sha>. Two processes prepare the same inputs; they take turns of a
fraction of a second, in the order ABBA, and one waits while the other runs. A row that looks slower than the limit
is measured again, longer and in new processes. The exit code is 1 if one is still slower or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import report
from measure import Load, cpu_name
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from side import ROWS

HERE = Path(__file__).parent
ROOT = HERE.parent
SLICE = 0.05  # seconds of a turn
LEAST = 4  # turns of each side
Turn = Callable[[float], float]  # seconds to spend -> seconds of the best call
Pair = tuple[float, float]  # seconds of this tree and of the other commit, in turns side by side


# Comparing


@dataclass(frozen=True)
class Row:
    """A row's pairs of times. With a fault it has none."""

    name: str
    pairs: Sequence[Pair] = ()
    fault: str = ""

    @property
    def best(self) -> Pair:
        this, other = zip(*self.pairs, strict=True)
        return min(this), min(other)

    @property
    def ratio(self) -> float:
        """This tree's best time by the other's; above 1 this tree is slower."""
        return self.best[0] / self.best[1]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of the ratios of the pairs. Their median is a second opinion, their distance the noise."""
        first, median, third = statistics.quantiles([this / other for this, other in self.pairs])
        return first, median, third

    def slower(self, limit: float) -> bool:
        """Both the best times and the median say so: noise seldom spoils both."""
        return not self.fault and min(self.ratio, self.quartiles[1]) > limit


def take_turns(this: Turn, other: Turn, seconds: float, turn: float = SLICE) -> list[Pair]:
    """Times both in turns, ABBA, so that what changes slowly (clock, temperature, load) meets both alike."""
    pairs: list[Pair] = []
    begin = perf_counter()
    while len(pairs) < LEAST or perf_counter() - begin < seconds:
        if len(pairs) % 2:
            theirs, ours = other(turn), this(turn)
        else:
            ours, theirs = this(turn), other(turn)
        pairs.append((ours, theirs))
    return pairs


# Processes


class Worker:
    """A process of `side.py`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], threads: int) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*command, str(HERE / "side.py"), str(threads)], stdin=pipe, stdout=pipe, text=True, env=environment
        )
        self.about = self.answer()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()  # closes stdin, which ends it

    def ask(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended with {self.process.wait()}")
        return json.loads(line)

    def time(self, seconds: float) -> float:
        self.ask("time", seconds)
        found: float = self.answer()
        return found


@contextmanager
def workers(site: Path, threads: int) -> Iterator[tuple[Worker, Worker]]:
    """This interpreter with its own `regard`, and with the one in `site`.

    An editable install puts a finder before all paths; without the module `site` (-S) it does not exist, and the
    packages come through PYTHONPATH. It acts on imports alone, so calls cost the same.
    """
    other = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    with ExitStack() as stack:
        both = (
            stack.enter_context(Worker([sys.executable], dict(os.environ), threads)),
            stack.enter_context(Worker([sys.executable, "-S"], other, threads)),
        )
        found = Path(both[1].about["file"])
        if site not in found.parents:
            raise RuntimeError(f"regard: expected the other commit's in {site}, got {found}")
        yield both


def measured(name: str, both: tuple[Worker, Worker], seconds: float, shrink: int | None) -> Row:
    for worker in both:
        worker.ask("prepare", name, shrink)
    faults = [worker.answer() for worker in both]
    said = [f"{who}: {fault}" for who, fault in zip(("this", "other"), faults, strict=True) if fault]
    if said:
        return Row(name, fault="; ".join(said))
    return Row(name, take_turns(both[0].time, both[1].time, seconds))


# The other commit


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def built(sha: str, console: Console) -> Path:
    """Returns the folder with the installed `regard` of a commit. It is built there if it does not exist yet."""
    home = ROOT / "build" / "against" / sha
    if home.exists():
        return home
    console.print(f"Building the core of {sha[:12]}")
    tree, fresh = home.with_suffix(".tree"), home.with_suffix(".new")
    for old in (tree, fresh):
        shutil.rmtree(old, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", sha], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    options = ["--no-build-isolation", "--no-deps", "--target", str(fresh)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"PATH": path, "REGARD_REQUIRE_CORE": "1"}
    subprocess.run([*install, *options, str(tree)], env=environment, check=True)
    shutil.rmtree(tree)
    return fresh.rename(home)


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = report.console()
    names = chosen(options.only)
    sha = git("rev-parse", "--verify", f"{options.ref}^{{commit}}")
    site = options.site or built(sha, console)
    load = Load()
    with Progress(console=console, transient=True) as progress:
        rows, about = compare(names, site, options, options.seconds, progress)
        for _ in range(options.again):
            slow = [row.name for row in rows.values() if row.slower(options.limit)]
            if slow:
                rows |= compare(slow, site, options, 3 * options.seconds, progress)[0]
    console.print(header(sha, about, options, load), highlight=False)
    console.print(table(list(rows.values()), options.limit))
    return verdict(list(rows.values()), options.limit, console)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", metavar="REF", help="the other commit; HEAD: without what is not committed")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a row's name")
    parser.add_argument("--quick", action="store_true", help="a quarter of the time")
    parser.add_argument("--limit", type=float, default=1.03, help="largest ratio of this tree's time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="for each row (default 4; 1 with --quick)")
    parser.add_argument("--again", type=int, default=2, help="how often slow rows are measured again")
    parser.add_argument("--shrink", type=int, metavar="L", help="cut rows to L tokens")
    parser.add_argument("--site", type=Path, help="a folder with the other `regard`, installed already")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 1.0 if options.quick else 4.0
    return options


def chosen(only: Sequence[str]) -> list[str]:
    names = [name for name in ROWS if not only or any(part in name for part in only)]
    if not names:
        raise ValueError(f"--only: expected a part of {', '.join(ROWS)}, got {list(only)}")
    return names


def compare(
    names: Sequence[str], site: Path, options: argparse.Namespace, seconds: float, progress: Progress
) -> tuple[dict[str, Row], list[str]]:
    """Returns the rows by name, and the kernels that the two sides use."""
    task = progress.add_task("timing", total=len(names))
    rows = {}
    with workers(site, options.threads) as both:
        for name in names:
            progress.update(task, description=f"timing {name}")
            rows[name] = measured(name, both, seconds, options.shrink)
            progress.advance(task)
        return rows, [worker.about["isa"] for worker in both]


def header(sha: str, isas: Sequence[str], options: argparse.Namespace, load: Load) -> str:
    this = git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    others = load.others()
    busy = "" if others is None else f", other processes took {others:.0%} of the CPUs"
    return (
        f"{cpu_name()}, threads: {options.threads}{busy}\n"
        f"this tree: {this} ({isas[0]}), the other: {sha[:12]} ({isas[1]})"
    )


def table(rows: Sequence[Row], limit: float) -> Table:
    """Times, the ratio of the best, and the ratios of the pairs: median and quartiles."""
    found = Table("row", "this", "other", "ratio", "median", "quartiles", "", box=SIMPLE_HEAD)
    for row in rows:
        if row.fault:
            found.add_row(row.name, *[""] * 5, row.fault)
            continue
        first, median, third = row.quartiles
        times = map(duration, row.best)
        spread = f"{first:.3f} to {third:.3f}"
        found.add_row(
            row.name, *times, f"{row.ratio:.3f}", f"{median:.3f}", spread, "slower" * row.slower(limit)
        )
    return found


def duration(seconds: float) -> str:
    return f"{1e6 * seconds:.2f} us" if seconds < 1e-3 else report.milliseconds(seconds)


def verdict(rows: Sequence[Row], limit: float, console: Console) -> int:
    slow = [row.name for row in rows if row.slower(limit)]
    wrong = [row.name for row in rows if row.fault]
    return 1 if slow or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
