"""A run from data to report: train on each seed, compare with the baselines, draw, time the steps."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn

from ..._progress import bar
from . import checkpoint as files
from .application import Application, Scores
from .options import Options
from .training import about, step_times, train

OWN = "Regard"  # the model's name among the baselines
TIMING = 10.0  # seconds for the speed ratio


class Outcome(NamedTuple):
    """Of one seed."""

    scores: Scores
    baselines: dict[str, Scores]
    seconds: float  # of training
    whole: float  # seconds of loading, training, scoring and the baselines
    threads: int


class Report(NamedTuple):
    """What a run found."""

    attention: str
    outcomes: list[Outcome]  # of each seed
    goals: dict[str, bool]  # whether the means over the seeds reach them
    alone: int  # seeds whose own numbers reach all goals
    step: float  # seconds of a training step, now
    ratio: float  # time of a step with PyTorch's attention / with Regard's
    checkpoint: Path
    picture: Path

    @property
    def reached(self) -> bool:
        return all(self.goals.values())

    @property
    def scores(self) -> dict[str, list[Scores]]:
        return _scores(self.outcomes)


def _scores(found: list[Outcome]) -> dict[str, list[Scores]]:
    """Of each baseline, and last of the model, as OWN; one for each seed."""
    each = [outcome.baselines | {OWN: outcome.scores} for outcome in found]
    return {name: [one[name] for one in each] for name in each[0]}


def run(kind: type[Application], options: Options) -> Report:
    """Train on every seed and compare. The model of the first seed is drawn and timed."""
    files.prepare(options.out)
    count = options.seeds or (1 if options.quick else kind.seeds)
    found = [_one(kind, seed, options) for seed in range(options.seed, options.seed + count)]
    app, model = load(kind, options)
    picture = options.place(kind.name, ".png")
    with torch.no_grad():
        app.draw(model, picture)
    times = step_times(app, model, 0.0 if options.quick else TIMING)
    return Report(
        options.attention, found, _goals(app, found),
        sum(all(_goals(app, [outcome]).values()) for outcome in found), times["regard"],
        times["torch"] / times["regard"], options.checkpoint(kind.name), picture,
    )  # fmt: skip


def _goals(app: Application, found: list[Outcome]) -> dict[str, bool]:
    """Of the means over these."""
    means = {name: averaged(scores) for name, scores in _scores(found).items()}
    return app.goals(means.pop(OWN), means)


def _one(kind: type[Application], seed: int, options: Options) -> Outcome:
    """Trained, or found finished, and scored."""
    began = perf_counter()
    app = kind(quick=options.quick, seed=seed)
    path = options.checkpoint(kind.name, seed)
    unfinished, whose = path.with_suffix(".resume"), about(app, options.attention)
    if not options.resume:
        unfinished.unlink(missing_ok=True)
    elif path.exists() and not unfinished.exists():
        finished = files.read(path, whose, Outcome._fields).about
        return Outcome(*(finished[part] for part in Outcome._fields))
    loaded = perf_counter() - began
    title = f"{app.name}, seed {seed}"
    with bar(title, app.recipe.steps) as update:

        def told(step: int, loss: float, best: float) -> None:
            update(completed=step, description=f"{title}  loss {loss:.3f}  best {best:.3f}")

        state = train(app, unfinished, options.attention, told)
    began = perf_counter()
    with torch.no_grad():
        scores = app.scores(state.model)
    baselines = app.baselines()
    whole = loaded + state.seconds + perf_counter() - began
    found = Outcome(scores, baselines, state.seconds, whole, torch.get_num_threads())
    files.write(path, state.model.state_dict(), whose | found._asdict())
    unfinished.unlink()
    return found


def load(kind: type[Application], options: Options) -> tuple[Application, nn.Module]:
    """A model that `run` has trained, and the application it is for."""
    path = options.checkpoint(kind.name)
    if not path.exists():
        kept = " --quick" * options.quick + " --attention torch" * (options.attention == "torch")
        raise ValueError(f"{path}: expected a checkpoint; train one with `regard run {kind.name}{kept}`")
    whose = {"application": kind.name, "quick": options.quick, "seed": options.seed}
    tensors = files.read(path, whose, ()).tensors
    app = kind(quick=options.quick, seed=options.seed)
    model = app.model()
    files.restore(model, tensors)
    return app, model.eval()


def averaged(found: list[Scores]) -> Scores:
    """The mean over seeds of each measure."""
    return {measure: mean(scores[measure] for scores in found) for measure in found[0]}
