"""Timing that is fair to both sides, and the machine's limits."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from regard.cost import best_times as best_times
from regard.cost._machine import fma_rate, read_rate
from regard.info import report as installation


@dataclass(frozen=True)
class Machine:
    facts: dict[str, str]
    threads: int
    fma: tuple[float, float]  # FLOP/s in float32, of one thread and of all
    read: tuple[float, float]  # bytes/s


def machine(threads: int, repeats: int = 10) -> Machine:
    buffer = torch.ones(2**26)
    one, all_ = (max(fma_rate(n) for _ in range(repeats)) for n in (1, threads))
    read = tuple(max(read_rate(buffer, n) for _ in range(repeats)) for n in (1, threads))
    return Machine(facts(threads), threads, (one, all_), (read[0], read[1]))


def looked_again(machine: Machine) -> Machine:
    """The better of what was known and one more look: a busy moment must not pass for the machine's limit."""
    one, all_ = (max(best, fma_rate(n)) for best, n in zip(machine.fma, (1, machine.threads), strict=True))
    return replace(machine, fma=(one, all_))


def facts(threads: int) -> dict[str, str]:
    installed = installation()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "CPU": cpu_name(),
        "threads": f"{threads} of {os.cpu_count()}",
        "regard": f"{installed['regard']}, kernels {installed.get('native isa', 'none')}",
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in named.items()}
    return f"{named.get('model name', platform.machine())}, family {named.get('cpu family', '?')}"


class Load:
    """The share of the CPUs that other processes take. Numbers from a busy machine need care."""

    def __init__(self) -> None:
        self.begin = self._read()

    def others(self) -> float | None:
        if self.begin is None or (end := self._read()) is None:
            return None
        total, idle, own = (b - a for a, b in zip(self.begin, end, strict=True))
        return max(0.0, (total - idle - own) / total) if total else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds in all, idle, and of this process and the children that ended."""
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        except OSError:
            return None
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in line.split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4], sum(os.times()[:4])
