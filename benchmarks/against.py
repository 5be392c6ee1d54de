"""`make bench-against REF=<commit>`: this tree beside another commit, row by row, on this machine.

The other commit is built once, into build/against/<sha>. Two processes prepare the same inputs and take turns
of 50 ms, in the order ABBA; one waits while the other runs. Several passes do so with new processes, because
where a process happens to find its memory is worth 1 or 2 %. Rows that look slower than their limit get more
passes. The exit code is 1 if a row stays slower, or if a result of this tree is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

import regard

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TURN = 0.05  # seconds
LEAST = 2  # turns of each side in a pass
MORE_PASSES, MORE = 6, 3  # for rows that look slower, and how much longer such a pass is
BUSY = 0.1  # share of the CPUs that others may take before the times need care
Options = argparse.Namespace
Turn = Callable[[float], float]  # seconds to spend -> seconds of the best call
Pair = tuple[float, float]  # seconds of this tree and of the other commit, in turns side by side


# Comparing


@dataclass(frozen=True)
class Row:
    """The times of both sides. With a fault there are none to show."""

    name: str
    pairs: Sequence[Pair] = ()
    faults: tuple[str, str] = ("", "")  # of this tree and of the other commit

    def __add__(self, more: Row) -> Row:
        """The row with the pairs of one more pass."""
        this, other = (a or b for a, b in zip(self.faults, more.faults, strict=True))
        return Row(self.name, [*self.pairs, *more.pairs], (this, other))

    @property
    def best(self) -> Pair:
        this, other = zip(*self.pairs, strict=True)
        return min(this), min(other)

    @property
    def ratio(self) -> float:
        """This tree's best time by the other's: above 1, this tree is slower."""
        this, other = self.best
        return this / other

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of the pairs' ratios. Their median is a second opinion, their distance shows the noise."""
        first, median, third = statistics.quantiles([this / other for this, other in self.pairs])
        return first, median, third

    def slower(self, limit: float) -> bool:
        """Whether both the best times and the median are beyond the limit: noise seldom moves both."""
        return not any(self.faults) and min(self.ratio, self.quartiles[1]) > limit

    def verdict(self, limit: float) -> str:
        """Returns "slower", "unclear" if a quarter of the turns says that it is faster, or ""."""
        return "" if not self.slower(limit) else "slower" if self.quartiles[0] > 1 else "unclear"


def take_turns(this: Turn, other: Turn, seconds: float) -> list[Pair]:
    """Times both in the order ABBA, so that slow changes of clock and load meet both alike."""
    pairs: list[Pair] = []
    begin = perf_counter()
    while len(pairs) < LEAST or perf_counter() - begin < seconds:
        if len(pairs) % 2:
            theirs, ours = other(TURN), this(TURN)
        else:
            ours, theirs = this(TURN), other(TURN)
        pairs.append((ours, theirs))
    return pairs


# Processes


class Worker:
    """A process that runs `side.py`."""

    def __init__(self, python: Sequence[str], environment: dict[str, str], threads: int) -> None:
        command, pipe = [*python, str(HERE / "side.py"), str(threads)], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()  # closes stdin, which ends the process

    def ask(self, *command: Any) -> Any:
        """Sends a command and waits for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args}: ended with exit code {self.process.wait()}")
        return json.loads(line)

    def time(self, seconds: float) -> float:
        return float(self.ask("time", seconds))


@contextmanager
def workers(site: Path, threads: int) -> Iterator[tuple[Worker, Worker]]:
    """This interpreter with its own `regard`, and with the one in the folder `site`.

    An editable install puts a finder before all folders. Python's option -S leaves it out, and PYTHONPATH
    then gives the other packages. The finder acts on imports alone: it makes no call slower.
    """
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    environments = dict(os.environ), os.environ | {"PYTHONPATH": path}
    with (
        Worker([sys.executable], environments[0], threads) as this,
        Worker([sys.executable, "-S"], environments[1], threads) as other,
    ):
        for worker, folder in ((this, ROOT), (other, site)):
            if folder not in Path(found := worker.ask("file")).parents:
                raise RuntimeError(f"regard: expected the one in {folder}, got {found}")
        yield this, other


def timed(name: str, both: tuple[Worker, Worker], seconds: float, shrink: int | None, checked: bool) -> Row:
    """Prepares a row on both sides, and times it if both results are right."""
    this, other = both
    asked = "prepare", name, shrink, checked
    faults = this.ask(*asked), other.ask(*asked)
    pairs = [] if any(faults) else take_turns(this.time, other.time, seconds)
    return Row(name, pairs, faults)


def progress_bar() -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def add_pass(
    rows: dict[str, Row], names: Sequence[str], site: Path, options: Options, seconds: float
) -> list[str]:
    """Adds the times of two new processes to the rows. Returns the kernels that they use."""
    with workers(site, options.threads) as both, progress_bar() as progress:
        for name in progress.track(names, description="timing"):
            row = timed(name, both, seconds, options.shrink, checked=name not in rows)
            rows[name] = rows[name] + row if name in rows else row
        return [worker.ask("isa") for worker in both]


# The other commit


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def commit(ref: str) -> str:
    try:
        return git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ValueError(f"REF: expected a commit, got {ref!r}") from None


def built(sha: str, console: Console) -> Path:
    """Returns the folder with the `regard` of a commit, which is made if that was not done before."""
    home = ROOT / "build" / "against" / sha
    if not home.exists():
        tree, site = home.with_suffix(".tree"), home.with_suffix(".site")
        for folder in (tree, site):
            shutil.rmtree(folder, ignore_errors=True)
        unpack(sha, tree)
        if has_our_core(sha):
            copy_core(tree, site)
        else:
            console.print(f"Building the core of {sha[:12]}")
            install(tree, site)
        shutil.rmtree(tree)
        site.rename(home)  # so it is whole
    return home


def unpack(sha: str, tree: Path) -> None:
    tree.mkdir(parents=True)
    with subprocess.Popen(["git", "-C", str(ROOT), "archive", sha], stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(tree)], stdin=archive.stdout, check=True)


def has_our_core(sha: str) -> bool:
    """Whether this tree compiles the same core as the commit."""
    sources = "--", "native", "CMakeLists.txt", "pyproject.toml"
    return not git("diff", "--name-only", sha, *sources) + git(
        "ls-files", "-o", "--exclude-standard", *sources
    )


def copy_core(tree: Path, site: Path) -> None:
    """Puts the Python files of `tree` and this tree's core into `site`."""
    shutil.copytree(tree / "src" / "regard", site / "regard")
    for folder in map(Path, regard.__path__):  # an editable install has two: sources, and the core
        for core in folder.rglob("_core*.so"):
            shutil.copy2(core, site / "regard" / core.relative_to(folder))


def install(tree: Path, site: Path) -> None:
    """Compiles `tree` as for a user, into `site`."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    options = ["--no-build-isolation", "--no-deps", "--target", str(site)]
    environment = os.environ | {"PATH": tools, "REGARD_REQUIRE_CORE": "1"}
    subprocess.run([*pip, *options, str(tree)], env=environment, check=True)


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = report.console()
    names = chosen(options.only)
    sha = commit(options.ref)
    site = built(sha, console)
    if options.realtime:  # also for the workers
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    load, rows = Load(), dict[str, Row]()
    for _ in range(options.passes):
        isas = add_pass(rows, names, site, options, options.seconds)
    for _ in range(MORE_PASSES):
        if slow := [row.name for row in rows.values() if row.slower(limit(row, options))]:
            add_pass(rows, slow, site, options, MORE * options.seconds)
    console.print(header(sha, isas, options, load), highlight=False)
    console.print(table(rows.values(), options))
    said, code = verdict(rows.values(), options)
    console.print(said, highlight=False)
    return code


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", metavar="REF", help="the other commit; HEAD to see what is not committed yet")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a row's name")
    parser.add_argument("--quick", action="store_true", help="two short passes")
    parser.add_argument("--limit", type=float, default=1.03, help="of this tree's time by the other's")
    parser.add_argument("--small-limit", type=float, default=1.02, help="for tiny calls and steps of caches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--realtime", action="store_true", help="before all other processes; mostly for root")
    parser.add_argument("--passes", type=int, help="default 4; 2 with --quick")
    parser.add_argument("--seconds", type=float, help="for a row in a pass (default 1; 0.2 with --quick)")
    parser.add_argument("--shrink", type=int, metavar="L", help="cut rows to L tokens")
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    options.passes = options.passes or (2 if options.quick else 4)
    options.seconds = options.seconds or (0.2 if options.quick else 1.0)
    return options


def chosen(only: Sequence[str]) -> list[str]:
    names = [name for name in ROWS if not only or any(part in name for part in only)]
    if not names:
        raise ValueError(f"--only: expected a part of {', '.join(ROWS)}, got {list(only)}")
    return names


def limit(row: Row, options: Options) -> float:
    return float(options.small_limit if row.name.startswith(("tiny", "step of")) else options.limit)


def header(sha: str, isas: Sequence[str], options: Options, load: Load) -> str:
    """Where the times come from: the machine, the two commits, and the command."""
    this = git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    lines = [
        f"{cpu_name()}, threads: {options.threads}",
        f"this tree: {this}, kernels {isas[0]}; the other: {sha[:12]}, kernels {isas[1]}",
        f"python benchmarks/against.py {shlex.join(options.arguments)}",
    ]
    others = load.others()
    if others is not None and others > BUSY and not options.realtime:
        lines.append(f"Other processes took {others:.0%} of the CPUs: times need care. Or --realtime.")
    return "\n".join(lines)


def table(rows: Iterable[Row], options: Options) -> Table:
    """Best times and their ratio; then of the ratios in turns the median and the quartiles."""
    shown = Table("row", "this", "other", "ratio", "median", "quartiles", "", box=SIMPLE_HEAD)
    for row in rows:
        if any(row.faults):
            faults = zip(("this tree", "the other"), row.faults, strict=True)
            shown.add_row(row.name, *[""] * 5, "; ".join(f"{who}: {fault}" for who, fault in faults if fault))
            continue
        first, median, third = (f"{x:.3f}" for x in row.quartiles)
        said = f"{row.ratio:.3f}", median, f"{first} to {third}", row.verdict(limit(row, options))
        shown.add_row(row.name, *map(duration, row.best), *said)
    return shown


def duration(seconds: float) -> str:
    return report.milliseconds(seconds) if seconds >= 1e-3 else f"{1e6 * seconds:.2f} us"


def verdict(rows: Iterable[Row], options: Options) -> tuple[str, int]:
    """Returns what to say, and the exit code."""
    verdicts = {row.name: "wrong" if row.faults[0] else row.verdict(limit(row, options)) for row in rows}
    kinds = {
        "wrong": "Wrong",
        "slower": "Slower",
        "unclear": "Slower or noise, to be repeated on a quiet machine",
    }
    said = [
        f"{text}: {', '.join(name for name, found in verdicts.items() if found == kind)}."
        for kind, text in kinds.items()
        if kind in verdicts.values()
    ]
    return " ".join(said) or "No row is slower.", 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
