"""Runs every experiment and writes its finding into the table of docs/claims/README.md.

`python docs/claims/every.py [NAME ...]` runs all experiments, or only the named ones. The rows of
other experiments stay unchanged.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

from finding import Finding

PAGE = Path(__file__).parent / "README.md"
NAMES = (
    "variance",
    "row_sums",
    "quadratic_time",
    "weight_count",
    "head_flops",
    "flash_memory",
    "worked_example",
    "softmax_example",
    "parameters",
    "sequence_first",
    "masked_row",
    "unused_mask",
    "clip_towers",
    "subspaces",
    "comparison",
    "parallel_heads",
)


def row(name: str, found: Finding) -> str:
    command = f"[`python docs/claims/{name}.py`]({name}.py)"
    return f"| {' | '.join((found.claim, f'**{found.verdict}**', found.measured, found.correct, command))} |"


def rows(page: str) -> dict[str, str]:
    """Returns the table rows of the page as a dict from experiment name to row."""
    return {match[1]: match[0] for match in re.finditer(r"^\| .*\]\((\w+)\.py\) \|$", page, re.M)}


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise SystemExit(f"no such experiment: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        found = import_module(name).measure()
        print(f"{found}\n", flush=True)
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.replace(rows(page)[name], row(name, found)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
