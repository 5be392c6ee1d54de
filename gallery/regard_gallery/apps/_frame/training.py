"""The training loop. The randomness of a step depends only on the seed and the step number, so that
a resumed run gives the same result as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from regard.cost import best_times

from . import checkpoint as files
from .application import Application, Recipe, Scores
from .plain import plain

ATTENTIONS = ("regard", "torch")
Build = Callable[[], nn.Module] | None  # builds a model; None: the application's `model`
Progress = Callable[[int, float, float], None]  # called with steps done, last loss, best validation score


@dataclass
class State:
    """The state of a training run. Training can be resumed from it."""

    model: nn.Module
    optimizer: AdamW
    step: int = 0
    seconds: float = 0.0
    best: float = -math.inf
    best_weights: dict[str, Tensor] = field(default_factory=dict)  # weights of the best validation so far


def rival_scores(app: Application, rival: Build) -> Scores:
    """Trains the model that `rival()` builds and returns its test scores.

    The data and the training recipe are those of the application.
    """
    model = train(app, None, "regard", lambda step, loss, best: None, rival).model
    with torch.no_grad():
        return app.scores(model)


def train(app: Application, path: Path | None, attention: str, tick: Progress, build: Build = None) -> State:
    """Trains a model and returns the final state, with the weights of the best validation score.

    Every validation writes a checkpoint to `path`, unless `path` is None. If the file `path` exists
    at the start, training resumes from it. The caller deletes the file. `tick` is called after
    every step. If `build` is given, it builds the model instead of `app.model`.
    """
    state, metadata = begin(app, attention, build), about(app, attention)
    if path is not None and path.exists():
        _resume(state, path, metadata)
    recipe = app.recipe
    start, before = perf_counter(), state.seconds
    while state.step < recipe.steps:
        loss = _step(app, state)
        if state.step % recipe.every == 0 or state.step == recipe.steps:
            _validate(app, state)
            state.seconds = before + perf_counter() - start
            if path is not None:
                _save(state, path, metadata)
        tick(state.step, loss, state.best)
    state.model.load_state_dict(state.best_weights)
    state.model.eval()
    return state


def begin(app: Application, attention: str, build: Build = None) -> State:
    """Returns the state before the first step: a new model and its optimizer."""
    if attention not in ATTENTIONS:
        raise ValueError(f"attention: expected one of {', '.join(ATTENTIONS)}, got {attention!r}")
    torch.manual_seed(app.seed)
    model = app.model() if build is None else build()
    if attention == "torch":
        plain(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return State(model, AdamW(parameters, lr=app.recipe.rate, weight_decay=app.recipe.decay, fused=True))


def rate(recipe: Recipe, step: int) -> float:
    """Returns the learning rate of step number `step`. The first step has number 0."""
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.rate * (0.5 + 0.5 * math.cos(math.pi * progress)) if recipe.falls else recipe.rate


def _step(app: Application, state: State) -> float:
    number = app.seed * 1_000_003 + state.step
    torch.manual_seed(number)
    state.model.train()
    batch = app.batch(state.model, torch.Generator().manual_seed(number))
    for group in state.optimizer.param_groups:
        group["lr"] = rate(app.recipe, state.step)
    state.step += 1
    loss = update(app, state.model, state.optimizer, batch)
    if not math.isfinite(loss):
        raise ValueError(f"loss: expected a finite number at step {state.step}, got {loss}")
    return loss


def update(app: Application, model: nn.Module, optimizer: AdamW, batch: object) -> float:
    """Runs one training step (forward, backward, optimizer) on a batch. Returns the loss."""
    loss = app.loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), app.recipe.clip)
    optimizer.step()
    return loss.item()


def _validate(app: Application, state: State) -> None:
    state.model.eval()
    with torch.no_grad():
        score = app.validation(state.model)
    if score > state.best or not state.best_weights:
        state.best = score
        state.best_weights = {name: x.detach().clone() for name, x in state.model.state_dict().items()}


# Resuming


def about(app: Application, attention: str) -> dict[str, object]:
    """Returns the metadata of checkpoints: the application, its options and its `Recipe`."""
    options = {"application": app.name, "quick": app.quick, "seed": app.seed, "attention": attention}
    return options | {"recipe": asdict(app.recipe)}


def _save(state: State, path: Path, metadata: dict[str, object]) -> None:
    tensors = files.named(state.model.state_dict(), "model.") | files.named(state.best_weights, "best.")
    tensors |= files.named(files.of_optimizer(state.optimizer), "optimizer.")
    files.write(path, tensors, metadata | {"step": state.step, "seconds": state.seconds, "best": state.best})


def _resume(state: State, path: Path, metadata: dict[str, object]) -> None:
    tensors, stored = files.read(path, metadata, ("step", "seconds", "best"))
    files.restore(state.model, files.part(tensors, "model."))
    files.restore_optimizer(state.optimizer, files.part(tensors, "optimizer."))
    state.best_weights = files.part(tensors, "best.")
    state.step, state.seconds, state.best = stored["step"], stored["seconds"], stored["best"]


# Speed


def step_times(app: Application, model: nn.Module, seconds: float) -> dict[str, float]:
    """Returns the seconds of a training step with Regard's and with PyTorch's attention.

    The keys of the result are "regard" and "torch". All steps use the same batch. The two
    implementations take turns for about `seconds` in total. The result has the shortest time of
    each implementation.
    """
    batch = app.batch(model, torch.Generator().manual_seed(0))

    def step(attention: str) -> Callable[[], float]:
        copy = begin(app, attention)
        copy.model.load_state_dict(model.state_dict())
        copy.model.train()
        return lambda: update(app, copy.model, copy.optimizer, batch)

    return best_times({attention: step(attention) for attention in ATTENTIONS}, seconds)
