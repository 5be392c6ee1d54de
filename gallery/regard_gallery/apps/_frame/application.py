"""The base class of applications, and `Recipe`, the hyperparameters of their training."""

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
    """Hyperparameters of training with AdamW.

    The learning rate rises linearly to `rate` over `warmup` steps. Then it decays to 0 as a cosine,
    or stays constant if `falls` is False.
    """

    steps: int
    rate: float = 1e-3
    decay: float = 0.0
    warmup: int = 0
    falls: bool = True  # False: the learning rate is constant after the warmup
    clip: float = 1.0  # gradients are scaled down to at most this norm
    every: int = 100  # steps between validations; every validation writes a checkpoint


class Application(ABC):
    """A task: data, a model, a loss, measures, and simple baselines that the model must beat.

    With `quick`, the application uses only a part of the data, for tests. The seed determines
    everything random: the split, the initial weights and the batches.
    """

    name: ClassVar[str]
    more: ClassVar[tuple[str, ...]] = ()  # measures for which higher is better
    less: ClassVar[tuple[str, ...]] = ()  # measures for which lower is better
    peers: ClassVar[tuple[str, ...]] = ()  # baselines listed for comparison, which need not be beaten
    request: ClassVar[str]  # describes the argument of `use`, for error messages
    seeds: ClassVar[int] = 1  # number of seeds of a full run
    full: ClassVar[Recipe]  # the recipe of a full run
    trial: ClassVar[Recipe] = Recipe(steps=2, every=2)  # the recipe of a quick run
    tested: Any  # test data, passed to `measure` as `held`
    validated: Any  # validation data, passed to `measure` as `held`

    def __init__(self, *, quick: bool = False, seed: int = 0) -> None:
        self.quick, self.seed = quick, seed
        self.load()

    @property
    def recipe(self) -> Recipe:
        return self.trial if self.quick else self.full

    @abstractmethod
    def load(self) -> None:
        """Loads the data and splits it into training, validation and test data."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Returns a new model. Draws the initial weights from PyTorch's global generator."""

    @abstractmethod
    def batch(self, model: nn.Module, generator: torch.Generator) -> Any:
        """Returns a training batch.

        Only the application `control` uses `model`, to play the episodes of the batch.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    @abstractmethod
    def measure(self, model: nn.Module, held: Any) -> Scores:
        """Returns the model's scores on `held`, which is `self.tested` or `self.validated`.

        The keys of the result are the names of the measures: those in `more`, for which higher is
        better, and those in `less`, for which lower is better.
        """

    def validation(self, model: nn.Module) -> float:
        """Returns the validation score. Training keeps the weights with the highest score."""
        first, *_ = self.more + self.less
        return self.measure(model, self.validated)[first] * self._sign(first)

    def _sign(self, measure: str) -> int:
        return 1 if measure in self.more else -1

    def scores(self, model: nn.Module) -> Scores:
        return self.measure(model, self.tested)

    @abstractmethod
    def baselines(self) -> dict[str, Scores]:
        """Returns the scores of each baseline on the test data. The keys are names of baselines."""

    @abstractmethod
    def draw(self, model: nn.Module, path: Path) -> None:
        """Writes a picture of the model's attention or of its results."""

    def use(self, model: nn.Module, request: str) -> str:
        """Returns the trained model's answer to a request from the command line."""
        if not request.strip():
            raise ValueError(f"use: expected {self.request}, got nothing")
        return self.answer(model, request)

    @abstractmethod
    def answer(self, model: nn.Module, request: str) -> str:
        """Returns the trained model's answer to a request that is not blank."""

    def number(self, request: str, among: Container[int]) -> int:
        """Parses the request as an integer. Raises ValueError unless it is in `among`."""
        if request.isascii() and request.isdecimal() and int(request) in among:
            return int(request)
        bounds = f" (here {among[0]} to {among[-1]})" if isinstance(among, range) else ""
        raise ValueError(f"use: expected {self.request}{bounds}, got {request!r}")

    def goals(self, own: Scores, baselines: dict[str, Scores]) -> dict[str, bool]:
        """Returns, for each goal of a full run, whether the model's scores `own` reach it.

        The keys describe the goals. By default, the model must beat every baseline that is not in
        `peers`, in every measure.
        """
        return {
            f"{measure} better than {name}": (own[measure] - scores[measure]) * self._sign(measure) > 0
            for name, scores in baselines.items()
            if name not in self.peers
            for measure in self.more + self.less
        }


def shuffled(count: int, seed: int) -> Tensor:
    """Returns a random permutation of 0, ..., count - 1, which depends only on `seed`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
