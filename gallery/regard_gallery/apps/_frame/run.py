"""A complete run of an application: trains and scores the model and the baselines with each seed,
draws a picture, and times training steps.
"""

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

OWN = "Regard"  # the key of the model in dicts of scores; other keys are baselines
TIMING = 10.0  # seconds spent on timing training steps with both attention implementations


class Outcome(NamedTuple):
    """Scores and times of the run with one seed."""

    scores: Scores
    baselines: dict[str, Scores]
    seconds: float  # time of training
    whole: float  # time of loading, training, scoring and baselines together, in seconds
    threads: int


class Report(NamedTuple):
    """The results of a run with all its seeds: scores, goals, step times and output paths."""

    attention: str
    outcomes: list[Outcome]  # one per seed
    goals: dict[str, bool]  # for each goal, whether the scores averaged over the seeds reach it
    alone: int  # number of seeds whose own scores reach all goals
    step: float  # seconds of a training step with Regard's attention
    ratio: float  # step time with PyTorch's attention divided by `step`
    checkpoint: Path
    picture: Path

    @property
    def reached(self) -> bool:
        return all(self.goals.values())

    @property
    def scores(self) -> dict[str, list[Scores]]:
        return _scores(self.outcomes)


def _scores(outcomes: list[Outcome]) -> dict[str, list[Scores]]:
    """Maps each baseline's name, and "Regard" for the model, to a list of its scores by seed."""
    by_seed = [outcome.baselines | {OWN: outcome.scores} for outcome in outcomes]
    return {name: [scores[name] for scores in by_seed] for name in by_seed[0]}


def run(kind: type[Application], options: Options) -> Report:
    """Trains and scores a model with every seed. Draws and times the model of the first seed."""
    files.prepare(options.out)
    count = options.seeds or (1 if options.quick else kind.seeds)
    outcomes = [_run_seed(kind, seed, options) for seed in range(options.seed, options.seed + count)]
    app, model = load(kind, options)
    picture = options.place(kind.name, ".png")
    with torch.no_grad():
        app.draw(model, picture)
    times = step_times(app, model, 0.0 if options.quick else TIMING)
    return Report(
        options.attention, outcomes, _goals(app, outcomes),
        sum(all(_goals(app, [outcome]).values()) for outcome in outcomes), times["regard"],
        times["torch"] / times["regard"], options.checkpoint(kind.name), picture,
    )  # fmt: skip


def _goals(app: Application, outcomes: list[Outcome]) -> dict[str, bool]:
    """Returns, for each goal, whether the mean scores over all seeds reach it."""
    means = {name: averaged(scores) for name, scores in _scores(outcomes).items()}
    return app.goals(means.pop(OWN), means)


def _run_seed(kind: type[Application], seed: int, options: Options) -> Outcome:
    """Trains and scores a model with one seed.

    With `resume`, continues an interrupted run, or reads the outcome of a finished run from its
    checkpoint instead of training.
    """
    began = perf_counter()
    app = kind(quick=options.quick, seed=seed)
    path = options.checkpoint(kind.name, seed)
    unfinished, expected = path.with_suffix(".resume"), about(app, options.attention)
    if not options.resume:
        unfinished.unlink(missing_ok=True)
    elif path.exists() and not unfinished.exists():
        finished = files.read(path, expected, Outcome._fields).about
        return Outcome(*(finished[field] for field in Outcome._fields))
    loaded = perf_counter() - began
    title = f"{app.name}, seed {seed}"
    with bar(title, app.recipe.steps) as update:

        def progress(step: int, loss: float, best: float) -> None:
            update(completed=step, description=f"{title}  loss {loss:.3f}  best {best:.3f}")

        state = train(app, unfinished, options.attention, progress)
    began = perf_counter()
    with torch.no_grad():
        scores = app.scores(state.model)
    baselines = app.baselines()
    whole = loaded + state.seconds + perf_counter() - began
    outcome = Outcome(scores, baselines, state.seconds, whole, torch.get_num_threads())
    files.write(path, state.model.state_dict(), expected | outcome._asdict())
    unfinished.unlink()
    return outcome


def load(kind: type[Application], options: Options) -> tuple[Application, nn.Module]:
    """Loads the application's data, and the trained model from the checkpoint that `run` wrote."""
    path = options.checkpoint(kind.name)
    if not path.exists():
        flags = " --quick" * options.quick + " --attention torch" * (options.attention == "torch")
        raise ValueError(f"{path}: expected a checkpoint; train one with `regard run {kind.name}{flags}`")
    expected = {"application": kind.name, "quick": options.quick, "seed": options.seed}
    tensors = files.read(path, expected, ()).tensors
    app = kind(quick=options.quick, seed=options.seed)
    model = app.model()
    files.restore(model, tensors)
    return app, model.eval()


def averaged(by_seed: list[Scores]) -> Scores:
    """Returns the mean of each measure over the seeds."""
    return {measure: mean(scores[measure] for scores in by_seed) for measure in by_seed[0]}
