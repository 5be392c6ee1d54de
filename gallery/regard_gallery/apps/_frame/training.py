"""The training loop. A step depends on seed and number alone, so a run that was interrupted goes on alike."""

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
Build = Callable[[], nn.Module] | None  # None: the model of the application
Told = Callable[[int, float, float], None]  # steps done, the last loss, the best validation


@dataclass
class State:
    """What a run must know to go on."""

    model: nn.Module
    optimizer: AdamW
    step: int = 0
    seconds: float = 0.0
    best: float = -math.inf
    kept: dict[str, Tensor] = field(default_factory=dict)  # the weights that were best in validation


def rival_scores(app: Application, rival: Build) -> Scores:
    """Of another model, trained on the same data in the same way."""
    model = train(app, None, "regard", lambda step, loss, best: None, rival).model
    with torch.no_grad():
        return app.scores(model)


def train(app: Application, path: Path | None, attention: str, told: Told, build: Build = None) -> State:
    """Train, and leave the best weights in the model. If the file `path` is there, go on from it.

    The file is written after each validation and stays until the caller has what it trained for. `build`
    makes the model, if not the application's own.
    """
    state, whose = begin(app, attention, build), about(app, attention)
    if path is not None and path.exists():
        _resume(state, path, whose)
    recipe = app.recipe
    start, before = perf_counter(), state.seconds
    while state.step < recipe.steps:
        loss = _step(app, state)
        if state.step % recipe.every == 0 or state.step == recipe.steps:
            _validate(app, state)
            state.seconds = before + perf_counter() - start
            if path is not None:
                _save(state, path, whose)
        told(state.step, loss, state.best)
    state.model.load_state_dict(state.kept)
    state.model.eval()
    return state


def begin(app: Application, attention: str, build: Build = None) -> State:
    """A new model and its optimizer."""
    if attention not in ATTENTIONS:
        raise ValueError(f"attention: expected one of {', '.join(ATTENTIONS)}, got {attention!r}")
    torch.manual_seed(app.seed)
    model = app.model() if build is None else build()
    if attention == "torch":
        plain(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return State(model, AdamW(trained, lr=app.recipe.rate, weight_decay=app.recipe.decay, fused=True))


def rate(recipe: Recipe, step: int) -> float:
    """The learning rate of a step, from 0 on."""
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    past = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.rate * (0.5 + 0.5 * math.cos(math.pi * past)) if recipe.falls else recipe.rate


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
    """The whole of a training step but its data."""
    loss = app.loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), app.recipe.clip)
    optimizer.step()
    return loss.item()


def _validate(app: Application, state: State) -> None:
    state.model.eval()
    with torch.no_grad():
        found = app.validation(state.model)
    if found > state.best or not state.kept:
        state.best = found
        state.kept = {name: value.detach().clone() for name, value in state.model.state_dict().items()}


# Resuming


def about(app: Application, attention: str) -> dict[str, object]:
    """Whose checkpoint it is, and how it is trained."""
    whose = {"application": app.name, "quick": app.quick, "seed": app.seed, "attention": attention}
    return whose | {"recipe": asdict(app.recipe)}


def _save(state: State, path: Path, whose: dict[str, object]) -> None:
    tensors = files.named(state.model.state_dict(), "model.") | files.named(state.kept, "best.")
    tensors |= files.named(files.of_optimizer(state.optimizer), "optimizer.")
    files.write(path, tensors, whose | {"step": state.step, "seconds": state.seconds, "best": state.best})


def _resume(state: State, path: Path, whose: dict[str, object]) -> None:
    tensors, found = files.read(path, whose, ("step", "seconds", "best"))
    files.restore(state.model, files.part(tensors, "model."))
    files.restore_optimizer(state.optimizer, files.part(tensors, "optimizer."))
    state.kept = files.part(tensors, "best.")
    state.step, state.seconds, state.best = found["step"], found["seconds"], found["best"]


# Speed


def step_times(app: Application, model: nn.Module, seconds: float) -> dict[str, float]:
    """The shortest time of a whole training step with each attention, on the same batch, taking turns."""
    batch = app.batch(model, torch.Generator().manual_seed(0))

    def step(attention: str) -> Callable[[], float]:
        twin = begin(app, attention)
        twin.model.load_state_dict(model.state_dict())
        twin.model.train()
        return lambda: update(app, twin.model, twin.optimizer, batch)

    return best_times({attention: step(attention) for attention in ATTENTIONS}, seconds)
