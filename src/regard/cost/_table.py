"""`table`: the costs of several layers or models side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache as once
from typing import NamedTuple

import torch

from .._backends.native import core
from ._cache import AnyFormat, What
from ._estimate import TotalCost, estimate
from ._layers import Work
from ._machine import Machine, measure_machine
from ._time import Pass, attention_seconds


class ComparedRow(NamedTuple):
    """One row of a comparison: what is counted, with its unit, and one value per column."""

    name: str
    values: tuple[float, ...]

    def texts(self) -> list[str]:
        """Returns the values as text. A star marks the smallest, if they differ."""
        smallest = min(self.values) if len(set(self.values)) > 1 else None
        return [f"{short(value)}{'*' if value == smallest else ' '}" for value in self.values]


@dataclass(frozen=True)
class CostTable:
    """Costs side by side: a column for each layer or model. Its text marks the smallest of a row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[ComparedRow, ...]

    def __str__(self) -> str:
        lines = [["", *(f"{name} " for name in self.columns)]]
        lines += [[row.name, *row.texts()] for row in self.rows]
        return "\n".join([self.title, *aligned(lines), "* the smallest of a row"])


def table(
    specs: Mapping[str, What], tokens: int = 1024, *, past: int = 0, B: int = 1,
    dtype: torch.dtype = torch.float32, cache: AnyFormat | None = None, machine: Machine | None = None,
) -> CostTable:  # fmt: skip
    """Compares the costs of layers or models, in GFLOP, MiB and ms.

    Args:
        specs: column name -> a layer spec, several layer specs, a model spec, or a module, whose
            attention layers are counted.
        tokens, past, B, dtype, cache: as in `estimate`.
        machine: the machine for which to predict ms. Default: this machine, which is measured once
            and takes a few seconds. Without the compiled core, there are no ms.

    Example:
        >>> print(table({"MHA": AttentionSpec(512, 8), "GQA": AttentionSpec(512, 8, 2)}, 8192))
    """
    if not specs:
        raise ValueError("specs: expected at least one, got none")
    costs = [estimate(what, tokens, past=past, B=B, dtype=dtype, cache=cache) for what in specs.values()]
    values = zip(*map(_values, costs), strict=True)
    rows = [ComparedRow(name, row) for name, row in zip(NAMES, values, strict=True)]
    machine = machine or _this_machine()
    if machine is not None:
        rows += _milliseconds(specs, Work(tokens, past, B, dtype), machine)
    after = f" after {past:,}" if past else ""
    title = f"{B} x {tokens:,} tokens{after}, {str(dtype).removeprefix('torch.')}"
    return CostTable(title, tuple(specs), tuple(rows))


NAMES = (
    "parameters, million", "forward, GFLOP", "attention forward, GFLOP", "backward, GFLOP",
    "saved for backward, MiB", "cache, MiB",
)  # fmt: skip


def _values(cost: TotalCost) -> tuple[float, ...]:
    """Returns the values of the rows NAMES. FLOPs are those that the kernels execute."""
    flops = cost.forward_flops, cost.forward, cost.backward_flops
    sizes = cost.saved_bytes, cost.cache_bytes
    return (cost.parameters / 1e6, *(x.executed / 1e9 for x in flops), *(x / 2**20 for x in sizes))


def _milliseconds(specs: Mapping[str, What], work: Work, machine: Machine) -> list[ComparedRow]:
    kinds: tuple[Pass, ...] = ("forward", "training")
    rows = []
    for passes in kinds:
        seconds = [attention_seconds(what, work, machine, passes) for what in specs.values()]
        rows.append(ComparedRow(f"attention {passes}, ms", tuple(1e3 * x for x in seconds)))
    return rows


@once
def _this_machine() -> Machine | None:
    return None if core.reason_unavailable() else measure_machine()


def aligned(lines: list[list[str]], left: int = 0) -> list[str]:
    """Returns lines of columns of equal width. Column `left` is aligned at the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i == left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def short(value: float) -> str:
    """Formats a number with three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
