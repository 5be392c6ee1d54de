"""What an application says of itself. Training, checkpoints and reports do not differ between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Scores = dict[str, float]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW, whose rate rises for `warmup` steps and then falls as a cosine."""

    steps: int
    rate: float = 1e-3
    decay: float = 0.0
    warmup: int = 0
    falls: bool = True  # else the rate stays
    clip: float = 1.0  # of the gradient's norm
    every: int = 100  # steps between validations, each of which leaves a file to resume from


class Application(ABC):
    """One task: its data, a model, what it is trained for, and the plain baselines it must beat.

    With `quick` it is the same task on less of the same data, for tests. Whatever is random is drawn from
    `seed`: the same seed gives the same split and the same model.
    """

    name: ClassVar[str]
    more: ClassVar[tuple[str, ...]] = ()  # the names in `scores` of which more is better
    less: ClassVar[tuple[str, ...]] = ()  # and those of which less is
    peers: ClassVar[tuple[str, ...]] = ()  # of `baselines` those that stand beside it, not to be beaten
    request: ClassVar[str]  # what `use` takes, for the help
    seeds: ClassVar[int] = 1  # how many a full run averages over
    full: ClassVar[Recipe]  # how a full run trains
    trial: ClassVar[Recipe] = Recipe(steps=2, every=2)  # how a quick one does
    tested: Any  # held-out data, as `measure` takes it
    validated: Any  # likewise, apart from training and test

    def __init__(self, *, quick: bool = False, seed: int = 0) -> None:
        self.quick, self.seed = quick, seed
        self.load()

    @property
    def recipe(self) -> Recipe:
        return self.trial if self.quick else self.full

    @abstractmethod
    def load(self) -> None:
        """Loads the data and splits it."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, with weights drawn from PyTorch's generator."""

    @abstractmethod
    def batch(self, model: nn.Module, generator: torch.Generator) -> Any:
        """What the next step is trained on. Only who learns from acting looks at the model."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    @abstractmethod
    def measure(self, model: nn.Module, held: Any) -> Scores:
        """Returns the measures, `more` and `less`, on `tested` or `validated`."""

    def validation(self, model: nn.Module) -> float:
        """Returns how good the model is in validation; more is better. The best model is kept."""
        first, *_ = self.more + self.less
        return self.measure(model, self.validated)[first] * self._sign(first)

    def _sign(self, measure: str) -> int:
        return 1 if measure in self.more else -1

    def scores(self, model: nn.Module) -> Scores:
        return self.measure(model, self.tested)

    @abstractmethod
    def baselines(self) -> dict[str, Scores]:
        """The same measures of plain methods, by name."""

    @abstractmethod
    def draw(self, model: nn.Module, path: Path) -> None:
        """A picture of what the model attends to, or of what it found."""

    def use(self, model: nn.Module, request: str) -> str:
        """An answer of the trained model to a request of the command line."""
        if not request.strip():
            raise ValueError(f"use: expected {self.request}, got nothing")
        return self.answer(model, request)

    @abstractmethod
    def answer(self, model: nn.Module, request: str) -> str:
        """To a request that says something."""

    def number(self, request: str, among: Container[int]) -> int:
        """The request as one of these numbers."""
        if request.isascii() and request.isdecimal() and int(request) in among:
            return int(request)
        here = f" (here {among[0]} to {among[-1]})" if isinstance(among, range) else ""
        raise ValueError(f"use: expected {self.request}{here}, got {request!r}")

    def goals(self, own: Scores, baselines: dict[str, Scores]) -> dict[str, bool]:
        """What a full run must reach, and whether it has: better in every measure than all but `peers`."""
        return {
            f"{measure} better than {name}": (own[measure] - scores[measure]) * self._sign(measure) > 0
            for name, scores in baselines.items()
            if name not in self.peers
            for measure in self.more + self.less
        }


def shuffled(count: int, seed: int) -> Tensor:
    """Returns a random order of 0, ..., count - 1."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
