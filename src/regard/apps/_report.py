"""What a run prints: the numbers beside those of the baselines, goals, time, and where the files are."""

from __future__ import annotations

import json
from statistics import mean
from typing import TYPE_CHECKING

import torch

from ._application import Application, Scores
from ._options import Options
from ._run import Report, averaged, load, run

if TYPE_CHECKING:
    from rich.table import Table

OWN = "Regard"


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


def write(kind: type[Application], report: Report, options: Options) -> None:
    """The numbers as JSON, for the gallery."""
    found = {**report.baselines, OWN: report.own}
    numbers = {
        "measures": kind.more + kind.less,
        "more is better": kind.more,
        "seeds": len(report.own),
        "scores": {name: [averaged(scores), *_range(scores)] for name, scores in found.items()},
        "reached": report.reached,
        "quick": options.quick,
        "attention": options.attention,
        "seconds": report.seconds,
        "threads": report.threads,
        "step": report.step,
        "step threads": torch.get_num_threads(),
        "ratio": report.ratio,
    }
    path = options.out / f"{kind.name}.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _range(scores: list[Scores]) -> list[Scores]:
    """The least and the most over the seeds of each measure."""
    return [{m: pick(own[m] for own in scores) for m in scores[0]} for pick in (min, max)]


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
    write(kind, report, options)
    Console().print(table(kind, report))
    for goal, reached in report.goals.items():
        show(f"{'yes' if reached else 'NO '}  {goal}")
    now = threads(torch.get_num_threads())
    show(f"trained in {report.seconds:.0f} s with {threads(report.threads)}")
    show(f"a training step takes {1000 * report.step:.0f} ms with {now}, and with PyTorch's attention")
    show(f"{report.ratio:.2f} times as long as with Regard's")
    show(f"picture {report.picture}, checkpoint {report.checkpoint}")
    return 0 if report.reached or options.quick else 1


def threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
