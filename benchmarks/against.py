"""`make bench-against REF=<commit>`: compares the speed of this tree and another commit.

The other commit is built once, into build/against/<sha>. Two processes, one with this tree (A) and
one with the other commit (B), prepare the same inputs and take turns of 50 ms, in the order ABBA;
one waits while the other runs. Each pass starts new processes, because the placement of memory
changes times by 1 or 2 %. A row of the table is one timed case. If this tree is slower than the
limit allows, the row gets more passes. The exit code is 1 if this tree stays slower in any row, or
if a result of this tree is wrong.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import report
from measure import Load, cpu_name
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from side import ROWS
from worker import Worker

import regard

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TURN = 0.05  # seconds of one turn
LEAST = 2  # minimum turns of each side in a pass
MORE_PASSES, MORE = 6, 3  # extra passes for rows that seem slower; each takes MORE times as long
BUSY = 0.1  # share of the CPUs used by other processes above which a warning is printed
Options = argparse.Namespace
Turn = Callable[[float], float]  # seconds to spend -> seconds of the best call
Pair = tuple[float, float]  # seconds of this tree and of the other commit, in adjacent turns


# Comparing


@dataclass(frozen=True)
class Row:
    """The times of one case as pairs (this tree, other commit), or error messages."""

    name: str
    pairs: Sequence[Pair] = ()
    faults: tuple[str, str] = ("", "")  # errors of this tree and of the other commit

    def __add__(self, new: Row) -> Row:
        """Returns this row with the pairs of times of one more pass appended."""
        this, other = (a or b for a, b in zip(self.faults, new.faults, strict=True))
        return Row(self.name, [*self.pairs, *new.pairs], (this, other))

    @property
    def best(self) -> Pair:
        """The best times of this tree and of the other commit."""
        this, other = zip(*self.pairs, strict=True)
        return min(this), min(other)

    @property
    def ratio(self) -> float:
        """This tree's best time divided by the other commit's. Above 1, this tree is slower."""
        this, other = self.best
        return this / other

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The quartiles, over all pairs, of this tree's time divided by the other commit's."""
        first, median, third = statistics.quantiles([this / other for this, other in self.pairs])
        return first, median, third

    def slower(self, limit: float) -> bool:
        """Returns whether the ratio of best times and the median ratio both exceed the limit."""
        return not any(self.faults) and min(self.ratio, self.quartiles[1]) > limit

    def verdict(self, limit: float) -> str:
        """Returns "" unless this tree is slower than the limit allows.

        Otherwise returns "unclear" if this tree was at least as fast in a quarter of the pairs of
        times, else "slower".
        """
        return "" if not self.slower(limit) else "slower" if self.quartiles[0] > 1 else "unclear"


def take_turns(this: Turn, other: Turn, seconds: float) -> list[Pair]:
    """Times both calls in the order ABBA, so that changes of clock rate and load affect both."""
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


@contextmanager
def workers(site: Path, threads: int) -> Iterator[tuple[Worker, Worker]]:
    """Starts a worker with the installed `regard`, and one with the `regard` in the folder `site`.

    The second worker runs with Python's option -S, which disables the import finder of an editable
    install; that finder would precede all folders. PYTHONPATH then provides the other packages. The
    first worker keeps the finder, which does not slow down calls.
    """
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    environments = dict(os.environ), os.environ | {"PYTHONPATH": path}
    script = str(HERE / "side.py"), str(threads)
    with (
        Worker([sys.executable, *script], environments[0]) as this,
        Worker([sys.executable, "-S", *script], environments[1]) as other,
    ):
        for worker, folder in ((this, ROOT), (other, site)):
            if folder not in Path(file := worker.ask("file")).parents:
                raise RuntimeError(f"regard: expected the package in {folder}, got {file}")
        yield this, other


def timed(name: str, both: tuple[Worker, Worker], seconds: float, shrink: int | None, checked: bool) -> Row:
    """Prepares a row in both workers, and times it if both results are correct."""
    this, other = both
    command = "prepare", name, shrink, checked
    faults = this.ask(*command), other.ask(*command)
    turns = (partial(worker.ask, "time") for worker in both)
    pairs = [] if any(faults) else take_turns(*turns, seconds)
    return Row(name, pairs, faults)


def progress_bar() -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def add_pass(
    rows: dict[str, Row], names: Sequence[str], site: Path, options: Options, seconds: float
) -> list[str]:
    """Times the rows `names` in two new processes and adds the times to `rows`.

    Returns the instruction sets of the kernels of both processes.
    """
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
    """Returns the folder with the `regard` of a commit, which is built on first use."""
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
        site.rename(home)  # atomic: the folder is complete if it exists
    return home


def unpack(sha: str, tree: Path) -> None:
    tree.mkdir(parents=True)
    with subprocess.Popen(["git", "-C", str(ROOT), "archive", sha], stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(tree)], stdin=archive.stdout, check=True)


def has_our_core(sha: str) -> bool:
    """Returns whether the working tree and the commit have the same C++ core."""
    sources = "--", "native", "CMakeLists.txt", "pyproject.toml"
    return not git("diff", "--name-only", sha, *sources) + git(
        "ls-files", "-o", "--exclude-standard", *sources
    )


def copy_core(tree: Path, site: Path) -> None:
    """Copies the Python files in `tree` and the compiled core of the running Regard to `site`."""
    shutil.copytree(tree / "src" / "regard", site / "regard")
    for folder in map(Path, regard.__path__):  # an editable install has two folders: sources and core
        for core in folder.rglob("_core*.so"):
            shutil.copy2(core, site / "regard" / core.relative_to(folder))


def install(tree: Path, site: Path) -> None:
    """Installs `tree` into `site` with pip."""
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
    if options.realtime:  # workers inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    load, rows = Load(), dict[str, Row]()
    for _ in range(options.passes):
        isas = add_pass(rows, names, site, options, options.seconds)
    for _ in range(MORE_PASSES):
        if slow := [row.name for row in rows.values() if row.slower(limit(row, options))]:
            add_pass(rows, slow, site, options, MORE * options.seconds)
    console.print(header(sha, isas, options, load), highlight=False)
    console.print(table(rows.values(), options))
    message, code = verdict(rows.values(), options)
    console.print(message, highlight=False)
    return code


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", metavar="REF", help="the other commit; HEAD to compare uncommitted changes")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a row's name")
    parser.add_argument("--quick", action="store_true", help="two short passes")
    parser.add_argument("--limit", type=float, default=1.03, help="allowed ratio of the times")
    parser.add_argument("--small-limit", type=float, default=1.02, help="for tiny calls and cache steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--realtime", action="store_true", help="use real-time scheduling; may need root")
    parser.add_argument("--passes", type=int, help="default 4; 2 with --quick")
    parser.add_argument("--seconds", type=float, help="per row and pass (default 1; 0.2 with --quick)")
    parser.add_argument("--shrink", type=int, metavar="L", help="cut rows to L tokens")
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    options.passes = options.passes or (2 if options.quick else 4)
    options.seconds = options.seconds or (0.2 if options.quick else 1.0)
    return options


def chosen(only: Sequence[str]) -> list[str]:
    names = [name for name in ROWS if not only or any(part in name for part in only)]
    if not names:
        raise ValueError(f"--only: expected a substring of {', '.join(ROWS)}, got {list(only)}")
    return names


def limit(row: Row, options: Options) -> float:
    return float(options.small_limit if row.name.startswith(("tiny", "step of")) else options.limit)


def header(sha: str, isas: Sequence[str], options: Options, load: Load) -> str:
    """Returns lines of text that name the machine, the two commits and the command."""
    this = git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    lines = [
        f"{cpu_name()}, threads: {options.threads}",
        f"this tree: {this}, kernels {isas[0]}; the other: {sha[:12]}, kernels {isas[1]}",
        f"python benchmarks/against.py {shlex.join(options.arguments)}",
    ]
    others = load.others()
    if others is not None and others > BUSY and not options.realtime:
        lines.append(f"Other processes used {others:.0%} of the CPUs: times are unreliable. Try --realtime.")
    return "\n".join(lines)


def table(rows: Iterable[Row], options: Options) -> Table:
    """Returns a table with the best times, their ratio, and the quartiles of all ratios."""
    shown = Table("row", "this", "other", "ratio", "median", "quartiles", "", box=SIMPLE_HEAD)
    for row in rows:
        if any(row.faults):
            faults = zip(("this tree", "the other"), row.faults, strict=True)
            text = "; ".join(f"{side}: {fault}" for side, fault in faults if fault)
            shown.add_row(row.name, *[""] * 5, text)
            continue
        first, median, third = (f"{x:.3f}" for x in row.quartiles)
        ratios = f"{row.ratio:.3f}", median, f"{first} to {third}", row.verdict(limit(row, options))
        shown.add_row(row.name, *map(duration, row.best), *ratios)
    return shown


def duration(seconds: float) -> str:
    return report.milliseconds(seconds) if seconds >= 1e-3 else f"{1e6 * seconds:.2f} us"


def verdict(rows: Iterable[Row], options: Options) -> tuple[str, int]:
    """Returns sentences that name the wrong and the slower rows, and the exit code."""
    verdicts = {row.name: "wrong" if row.faults[0] else row.verdict(limit(row, options)) for row in rows}
    kinds = {
        "wrong": "Wrong",
        "slower": "Slower",
        "unclear": "Slower or noise; repeat on an idle machine",
    }
    sentences = [
        f"{text}: {', '.join(name for name, verdict in verdicts.items() if verdict == kind)}."
        for kind, text in kinds.items()
        if kind in verdicts.values()
    ]
    return " ".join(sentences) or "No row is slower.", 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
