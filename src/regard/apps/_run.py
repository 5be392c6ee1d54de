"""A run from data to report: train on each seed, compare with the baselines, draw, time the steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import nn

from . import _checkpoint as files
from ._application import Application, Scores
from ._options import Options
from ._training import Told, about, step_times, train

TIMING = 10.0  # seconds for the speed ratio


@dataclass(frozen=True)
class Report:
    """What a run found. Scores are lists, one for each seed."""

    attention: str
    own: list[Scores]
    baselines: dict[str, list[Scores]]
    goals: dict[str, bool]
    seconds: float  # of training, all seeds
    threads: int  # in training
    step: float  # seconds of a training step, now
    ratio: float  # time of a step with PyTorch's attention / with Regard's
    checkpoint: Path
    picture: Path

    @property
    def reached(self) -> bool:
        return all(self.goals.values())


class Outcome(NamedTuple):
    """Of one seed."""

    scores: Scores
    baselines: dict[str, Scores]
    seconds: float
    threads: int


def run(kind: type[Application], options: Options) -> Report:
    """Train on every seed and compare. The model of the first seed is drawn and timed."""
    count = options.seeds or (1 if options.quick else kind.seeds)
    seeds = range(options.seed, options.seed + count)
    found = [_one(kind(quick=options.quick, seed=seed), options) for seed in seeds]
    own = [outcome.scores for outcome in found]
    baselines = {name: [outcome.baselines[name] for outcome in found] for name in found[0].baselines}
    app, model = load(kind, options)
    picture = options.out / f"{kind.name}.png"
    app.draw(model, picture)
    times = step_times(app, model, 0.0 if options.quick else TIMING)
    return Report(
        options.attention,
        own,
        baselines,
        app.goals(averaged(own), {name: averaged(scores) for name, scores in baselines.items()}),
        sum(outcome.seconds for outcome in found),
        max(outcome.threads for outcome in found),
        times["regard"],
        times["torch"] / times["regard"],
        _checkpoint(kind, options),
        picture,
    )


def _one(app: Application, options: Options) -> Outcome:
    """Trained, or found finished, and scored."""
    path = _checkpoint(type(app), options, app.seed)
    unfinished, whose = path.with_suffix(".resume"), about(app, options.attention)
    if not options.resume:
        path.unlink(missing_ok=True)
        unfinished.unlink(missing_ok=True)
    if path.exists():
        finished = files.read(path, whose).about
        return Outcome(*(finished[part] for part in Outcome._fields))
    with _progress(f"{app.name}, seed {app.seed}", app.recipe.steps) as told:
        state = train(app, unfinished, options.attention, told)
    with torch.no_grad():
        scores = app.scores(state.model)
    found = Outcome(scores, app.baselines(), state.seconds, torch.get_num_threads())
    files.write(path, state.model.state_dict(), whose | found._asdict())
    unfinished.unlink()
    return found


def load(kind: type[Application], options: Options) -> tuple[Application, nn.Module]:
    """A model that `run` has trained, and the application it is for."""
    path = _checkpoint(kind, options)
    if not path.exists():
        raise ValueError(f"{path}: expected a checkpoint; train one with `regard run {kind.name}`")
    tensors, found = files.read(path, {"application": kind.name})
    app = kind(quick=bool(found["quick"]), seed=int(found["seed"]))
    model = app.model()
    files.restore(model, tensors)
    return app, model.eval()


def _checkpoint(kind: type[Application], options: Options, seed: int | None = None) -> Path:
    return options.out / f"{kind.name}-{options.seed if seed is None else seed}.safetensors"


def averaged(found: list[Scores]) -> Scores:
    """The mean over seeds of each measure."""
    return {measure: mean(scores[measure] for scores in found) for measure in found[0]}


@contextmanager
def _progress(title: str, steps: int) -> Iterator[Told]:
    """A bar on a terminal, with loss and best validation, which goes when it is full."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=steps)

        def told(step: int, loss: float, best: float) -> None:
            text = f"{title}  loss {loss:.3f}  best {best:.3f}"
            progress.update(task, completed=step, description=text)

        yield told
