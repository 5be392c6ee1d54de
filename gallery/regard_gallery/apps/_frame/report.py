"""The output of a run: a printed table and a JSON file with scores, goals and times."""

from __future__ import annotations

import json
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from regard.cli.console import tables

from .application import Application
from .options import Options
from .run import OWN, Report, load, run


def table(kind: type[Application], report: Report) -> Table:
    """Returns a table of the scores of the baselines and then of the model.

    With several seeds, a cell shows the mean and the range over the seeds.
    """
    measures = kind.more + kind.less
    rows = Table("", *measures, title=kind.name)
    model = f"{kind.name} by {'Regard' if report.attention == 'regard' else 'PyTorch'}"
    for name, by_seed in report.scores.items():
        label = model if name == OWN else name
        rows.add_row(label, *(_cell([scores[m] for scores in by_seed]) for m in measures))
    return rows


def _cell(values: list[float]) -> str:
    spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
    return f"{mean(values):.4f}{spread}"


def write(kind: type[Application], report: Report, options: Options) -> None:
    """Writes the scores and times to a JSON file. docs/gallery.md is generated from these files."""
    numbers = {
        "measures": kind.more + kind.less,
        "more is better": kind.more,
        "peers": kind.peers,
        "scores": report.scores,
        "reached": report.reached,
        "alone": report.alone,
        "seconds": [outcome.seconds for outcome in report.outcomes],
        "whole": [outcome.whole for outcome in report.outcomes],
        "threads": [outcome.threads for outcome in report.outcomes],
        "step": report.step,
        "step threads": torch.get_num_threads(),
        "ratio": report.ratio,
    }
    path = options.place(kind.name, ".json")
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def command(kind: type[Application], options: Options, request: str | None = None) -> int:
    """Executes `regard run` and returns the exit code, which is 1 if a full run misses a goal.

    With a request, prints the trained model's answer instead of training.
    """
    show = Console(highlight=False, markup=False, soft_wrap=True).print
    if request is not None:
        for name, is_set in (("resume", options.resume), ("seeds", options.seeds is not None)):
            if is_set:
                raise ValueError(f"{name}: expected nothing beside use, which trains nothing")
        app, model = load(kind, options)
        with torch.no_grad():
            show(app.use(model, request))
        return 0
    report = run(kind, options)
    write(kind, report, options)
    tables().print(table(kind, report))
    for goal, reached in report.goals.items():
        show(f"{'yes' if reached else 'NO '}  {goal}")
    whole, trained = (mean(getattr(one, span) for one in report.outcomes) for span in ("whole", "seconds"))
    show(f"each seed took {whole:.0f} s, of which training {trained:.0f} s")
    now = threads(torch.get_num_threads())
    show(f"a training step takes {1000 * report.step:.0f} ms with {now}, and with PyTorch's attention")
    show(f"{report.ratio:.2f} times as long as with Regard's")
    show(f"picture {report.picture}, checkpoint {report.checkpoint}")
    return 0 if report.reached or options.quick else 1


def threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
