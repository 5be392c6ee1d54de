"""What a run prints: the numbers beside those of the baselines, goals, time, and where the files are."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

import torch

from ._application import Application
from ._options import Options
from ._run import Report, load, run

if TYPE_CHECKING:
    from rich.table import Table


def table(kind: type[Application], report: Report) -> Table:
    """The numbers, baselines first. Over several seeds: the mean, and how far apart they are."""
    from rich.table import Table

    measures = kind.more + kind.less
    made = Table("", *measures, title=kind.name)
    own = f"{kind.name} by {'Regard' if report.attention == 'regard' else 'PyTorch'}"
    for name, found in (*report.baselines.items(), (own, report.own)):
        made.add_row(name, *(_cell([scores[m] for scores in found]) for m in measures))
    return made


def _cell(values: list[float]) -> str:
    spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
    return f"{mean(values):.4f}{spread}"


def command(kind: type[Application], options: Options, request: str | None = None) -> int:
    """What the command line does; 1 if a full run has not reached its goals."""
    from rich.console import Console

    show = Console(highlight=False, markup=False, soft_wrap=True).print
    if request is not None:
        app, model = load(kind, options)
        with torch.no_grad():
            show(app.use(model, request))
        return 0
    report = run(kind, options)
    Console().print(table(kind, report))
    for goal, reached in report.goals.items():
        show(f"{'yes' if reached else 'NO '}  {goal}")
    show(f"trained in {report.seconds:.0f} s with {torch.get_num_threads()} threads; a training step with")
    show(f"PyTorch's attention takes {report.ratio:.2f} times as long as with Regard's")
    show(f"picture {report.picture}, checkpoint {report.checkpoint}")
    return 0 if report.reached or options.quick else 1
