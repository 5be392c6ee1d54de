"""Command-line options that benchmarks share, and the closing line about the machine."""

from __future__ import annotations

import argparse

import torch
from measure import Load, cpu_name


def parser(about: str | None, seconds: float | None = None, each: str = "row") -> argparse.ArgumentParser:
    """Returns a parser with the option `--threads` and, unless `seconds` is None, `--seconds`.

    `seconds` is the default of `--seconds`, and `each` names what is timed that long, for its help.
    """
    new = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--threads", type=int, default=2)
    if seconds is not None:
        new.add_argument("--seconds", type=float, default=seconds, help=f"per {each}")
    return new


class Session:
    """A run of a benchmark: sets the number of threads and measures the load of other processes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.threads = options.threads
        torch.set_num_threads(self.threads)
        self.load = Load()

    def closing(self, what: str) -> str:
        """Returns the last line of the output: `what`, and the threads, CPU and load of the run."""
        share = self.load.others()
        busy = "" if share is None else f"; other processes used {share:.0%} of the CPUs"
        return f"\n{what}, {self.threads} threads, {cpu_name()}{busy}"
