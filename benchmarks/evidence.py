"""Compares time and peak memory of `evidence` with the time of attention and the size of q and k.

`python benchmarks/evidence.py` computes seven facts of one causal head in one call: `BlockMass`,
`BlockMax`, `TopK(8)`, `ColumnMass`, `Entropy`, `RowMax` and `DistanceHistogram`. It runs with 8,192
and with 100,000 tokens; `--tokens` sets other lengths. It fails if `evidence` needs more than 2.2
times the time of attention or more than 2 times the memory of q and k.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import command
import torch
from measure import best_times

import regard
from regard import masks as M
from regard.cost import peak_memory

WANT = (
    regard.BlockMass(128), regard.BlockMax(128), regard.TopK(8), regard.ColumnMass(), regard.Entropy(),
    regard.RowMax(), regard.DistanceHistogram(),
)  # fmt: skip
D = 64
MOST_TIME, MOST_MEMORY = 2.2, 2.0


class Row(NamedTuple):
    tokens: int
    attention: float  # seconds
    evidence: float
    extra: int  # peak bytes beyond the inputs, results included
    inputs: int  # bytes of q and k
    row: float  # seconds for one whole row of weights

    @property
    def holds(self) -> bool:
        return self.evidence <= MOST_TIME * self.attention and self.extra <= MOST_MEMORY * self.inputs

    def __str__(self) -> str:
        times, share = self.evidence / self.attention, self.extra / self.inputs
        cells = (
            f"{self.tokens:,}", f"{self.attention:.3g} s", f"{self.evidence:.3g} s", f"{times:.2f}",
            f"{self.extra / 2**20:.0f} MiB", f"{share:.2f}", f"{1e3 * self.row:.3g} ms",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 2.0)
    parser.add_argument("--tokens", type=int, action="append", help="default: 8192 and 100000")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    print("| tokens | attention | facts | facts / attention | peak memory | memory / (q + k) | one row |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    rows = []
    for tokens in options.tokens or (8192, 100_000):
        rows.append(measured(tokens, options.seconds))
        print(rows[-1], flush=True)
    print(session.closing(f"one causal head of {D}, {', '.join(map(repr, WANT))}"))
    return 0 if all(row.holds for row in rows) else 1


def measured(tokens: int, seconds: float) -> Row:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, tokens, D, generator=generator)
    attend = partial(regard.attention, q, k, v, mask=M.Causal(), impl="native")
    compute_facts = partial(regard.evidence, q, k, None, *WANT, mask=M.Causal(), impl="native")
    row = partial(regard.evidence, q, k, None, regard.Rows(-1), mask=M.Causal(), impl="native")
    best = best_times({"attention": attend, "facts": compute_facts, "row": row}, seconds, least=2)
    extra = peak_memory(compute_facts)
    if extra is None:
        raise OSError("the system does not report the peak memory of a process")
    return Row(tokens, best["attention"], best["facts"], extra, q.nbytes + k.nbytes, best["row"])


if __name__ == "__main__":
    sys.exit(main())
