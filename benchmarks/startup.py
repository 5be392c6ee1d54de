"""Times Regard and PyTorch from a fresh interpreter to the first result of attention.

`python benchmarks/startup.py` prints wall-clock and CPU seconds of both, and the ratio of the
medians. The runs of both alternate. It also prints the seconds of `regard --help` and of
`regard --version`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import command

INPUT = "import torch; x = torch.ones(1, 2, 8, 16); "
PROGRAMS = {
    "regard": INPUT + "import regard; regard.attention(x, x, x)",
    "PyTorch": INPUT + "torch.nn.functional.scaled_dot_product_attention(x, x, x)",
}


class Seconds(NamedTuple):
    wall: float
    cpu: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="the median is printed")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    runs: dict[str, list[Seconds]] = {name: [] for name in PROGRAMS}
    for _ in range(options.repeats):
        for name, program in PROGRAMS.items():
            runs[name].append(timed("-c", program))
    medians = {name: Seconds(*map(median, zip(*each, strict=True))) for name, each in runs.items()}
    for name, seconds in medians.items():
        print(f"first result, {name}: {seconds.wall:.2f} s, CPU {seconds.cpu:.2f} s")
    ours, theirs = medians["regard"], medians["PyTorch"]
    print(f"ratio regard / PyTorch: {ours.wall / theirs.wall:.2f}, CPU {ours.cpu / theirs.cpu:.2f}")
    for option in ("--help", "--version"):
        each = [timed("-m", "regard", option) for _ in range(options.repeats)]
        wall, cpu = map(median, zip(*each, strict=True))
        print(f"regard {option}: {wall:.2f} s, CPU {cpu:.2f} s")
    print(session.closing("fresh interpreters"))
    return 0


def timed(*arguments: str) -> Seconds:
    """Runs Python with `arguments` and returns the seconds until it ends."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


if __name__ == "__main__":
    sys.exit(main())
