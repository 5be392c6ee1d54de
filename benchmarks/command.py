"""What the benchmarks have in common as commands: threads, time, and the line about the machine."""

from __future__ import annotations

import argparse

import torch
from measure import Load, cpu_name


def parser(about: str | None, seconds: float | None = None, each: str = "row") -> argparse.ArgumentParser:
    """With `--threads` and, if there is a default, `--seconds` for `each` of what is timed."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--threads", type=int, default=2)
    if seconds is not None:
        found.add_argument("--seconds", type=float, default=seconds, help=f"for each {each}")
    return found


class Session:
    """From the arguments to the last line: the threads are set, and how busy the machine was is told."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.threads = options.threads
        torch.set_num_threads(self.threads)
        self.load = Load()

    def closing(self, what: str) -> str:
        share = self.load.others()
        busy = "" if share is None else f"; others took {share:.0%} of the CPUs"
        return f"\n{what}, {self.threads} threads, {cpu_name()}{busy}"
