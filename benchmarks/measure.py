"""Measures the machine: its peak arithmetic and read rates, and the load of other processes."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from regard.cost import best_times as best_times
from regard.cost._machine import fma_rate, read_rate
from regard.info import report as installation

PRODUCTS = {
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16",
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A machine's description, and its peak rates with one thread and with all threads."""

    facts: dict[str, str]
    threads: int
    fma: tuple[float, float]  # float32 FLOP/s
    read: tuple[float, float]  # bytes/s


def machine(threads: int, repeats: int = 10) -> Machine:
    buffer = torch.ones(2**26)
    one, all_ = (max(fma_rate(n) for _ in range(repeats)) for n in (1, threads))
    read = tuple(max(read_rate(buffer, n) for _ in range(repeats)) for n in (1, threads))
    return Machine(facts(threads), threads, (one, all_), (read[0], read[1]))


def looked_again(machine: Machine) -> Machine:
    """Returns the machine with its FLOP/s measured once more.

    The larger value is kept, so that a busy moment does not lower the peak.
    """
    one, all_ = (max(best, fma_rate(n)) for best, n in zip(machine.fma, (1, machine.threads), strict=True))
    return replace(machine, fma=(one, all_))


def facts(threads: int) -> dict[str, str]:
    installed = installation()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "CPU": cpu_name(),
        "threads": f"{threads} of {os.cpu_count()}",
        "regard": f"{installed['regard']}, kernels {installed.get('native isa', 'none')}",
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    fields = cpu_fields()
    name = fields.get("model name", platform.processor() or platform.machine())
    return f"{name}, family {fields.get('cpu family', '?')}"


def instruction_sets() -> list[str]:
    """Returns which vector instruction sets for products the CPU has, with Linux's names."""
    return [flag for flag in cpu_fields().get("flags", "").split() if flag in PRODUCTS]


def cpu_fields() -> dict[str, str]:
    """Returns the fields that Linux shows of the last CPU. On other systems, returns none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


class Load:
    """Measures the share of the CPUs that other processes use, which makes timings unreliable."""

    def __init__(self) -> None:
        self.begin = self._read()

    def others(self) -> float | None:
        """Returns the share of the CPUs that other processes used since this object was created.

        Returns None if the system does not report it.
        """
        if self.begin is None or (end := self._read()) is None:
            return None
        total, idle, ours = (b - a for a, b in zip(self.begin, end, strict=True))
        return max(0.0, (total - idle - ours) / total) if total else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Returns CPU seconds: total, idle, and used by this process and its finished children."""
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        except OSError:
            return None
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in line.split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4], sum(os.times()[:4])
