"""`make bench-peers`: Regard and other engines take turns at the same cases, on this machine.

Each engine has a process of its own, which lives as long as the run. The result of every call is
compared with float64 before it is timed. docs/peers.md explains the tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import report
import standings
from cases import ENGINE_CASES, Case, chosen
from engines import ENGINES, Engine
from install import HOME
from measure import Load
from rich.progress import Progress
from standings import Result, Row, Standings
from worker import Worker

HERE = Path(__file__).resolve().parent
PATIENCE = 120.0  # seconds to wait for an answer before an engine's process is killed
Options = argparse.Namespace


class Runner:
    """The process of one engine, for use in a `with` block.

    If the process ends or does not answer, the next command starts another.
    """

    version = ""

    def __init__(self, engine: type[Engine], options: Options) -> None:
        self.engine, self.options = engine, options
        self.worker: Worker | None = None

    def ready(self) -> str:
        """Installs the engine and asks for its version. Returns an error message, or ""."""
        try:
            fault = self.engine.install()
            self.version = "" if fault else self.ask("version")
        except RuntimeError as error:
            return str(error)
        return fault

    def ask(self, *command: Any) -> Any:
        """Sends a command to the process. Raises RuntimeError if there is no answer."""
        try:
            self.worker = self.worker or self.started()
            return self.worker.ask(*command, patience=PATIENCE)
        except RuntimeError:
            self.close()
            raise

    def started(self) -> Worker:
        """Starts the process, which imports the engine's library.

        The library's folder comes first in PYTHONPATH.
        """
        name, options = self.engine.name, self.options
        folders = [str(HOME / self.engine.folder)] * bool(self.engine.folder)
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        HOME.mkdir(parents=True, exist_ok=True)
        with open(HOME / f"{name}.out", "a", encoding="utf-8") as log:
            command = sys.executable, str(HERE / "turn.py")
            worker = Worker(command, os.environ | {"PYTHONPATH": path}, log)
        if fault := worker.ask("start", name, options.threads, options.pages, patience=PATIENCE):
            worker.close()
            raise RuntimeError(fault)
        return worker

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def raced(case: Case, running: Mapping[str, Runner], options: Options) -> Row:
    """Lets all engines that can run a case take turns. A wrong result is not timed."""
    times: dict[str, list[float]] = {name: [] for name, r in running.items() if not r.engine.reason(case)}
    faults: dict[str, str] = {}
    commands = [("prepare", case.name, options.shrink), *[("time", options.seconds)] * options.rounds]
    for turn, command in enumerate(commands):
        names = [name for name in times if name not in faults]
        for name in names if turn % 2 else reversed(names):
            try:
                answer = running[name].ask(*command)
            except RuntimeError as error:
                answer = f"failed: {error}"
            if isinstance(answer, str):
                faults |= {name: answer} if answer else {}
            else:
                times[name] += answer
    return Row(case.name, {name: result(times[name], faults.get(name, "")) for name in times})


def result(times: Sequence[float], fault: str) -> Result:
    return Result(fault=fault) if fault else Result(min(times), statistics.median(times))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    cases, engines = chosen(options.only, ENGINE_CASES), selected(options.engines)
    console, rows = report.console(), dict[str, Row]()
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        runners = {engine.name: stack.enter_context(Runner(engine, options)) for engine in engines}
        faults = {n: r.ready() for n, r in progress.track(runners.items(), description="installing")}
        if faults["regard"]:
            raise RuntimeError(f"regard: {faults['regard']}")
        running = {name: runner for name, runner in runners.items() if not faults[name]}
        load = Load()
        for case in progress.track(cases, description="timing"):
            rows[case.name] = raced(case, running, options)
            standings.show(console, rows[case.name])
    versions = {name: runner.version for name, runner in running.items()}
    missing = {name: fault for name, fault in faults.items() if fault}
    found = Standings(rows, versions, missing, standings.header(options, load))
    for text in [*(f"{name}: {fault}" for name, fault in missing.items()), found.header]:
        console.print(text, highlight=False)
    if options.write:
        standings.write(found)
    return 1 if any(row.results["regard"].fault for row in rows.values()) else 0


def selected(names: Sequence[str]) -> list[type[Engine]]:
    """Returns Regard, and the engines whose name contains one of `names`. Without names, all."""
    found = [e for e in ENGINES.values() if not names or any(name in e.name for name in names)]
    if not found:
        raise ValueError(f"--engines: expected a part of {', '.join(ENGINES)}, got {list(names)}")
    return found if ENGINES["regard"] in found else [ENGINES["regard"], *found]


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of cases' names")
    parser.add_argument("--engines", nargs="+", default=[], metavar="NAME", help="parts of engines' names")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each engine at a case")
    parser.add_argument("--seconds", type=float, default=0.1, help="of one turn")
    parser.add_argument("--pages", choices=("2M", "4K"), default="2M", help="size of the inputs' pages")
    parser.add_argument("--write", action="store_true", help="write the results to docs/peers.md")
    parser.add_argument("--shrink", type=int, metavar="L", help="cut cases to L tokens")
    options = parser.parse_args(arguments)
    if options.write and (options.engines or options.shrink):
        parser.error("--write: expected all engines and whole cases")
    return options


if __name__ == "__main__":
    sys.exit(main())
