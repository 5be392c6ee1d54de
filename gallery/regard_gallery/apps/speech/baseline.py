"""Plain recognisers of strings of words: the cheapest way through templates, which are recordings or HMMs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

NARROWEST = 0.1  # of a state's Gaussian, in units of a feature's spread over all frames


class Templates(NamedTuple):
    """A word each: its states one after the other, with the mean of the frames that lie on each."""

    mean: Tensor  # (n, longest, features)
    spread: Tensor | None  # the same shape: of a Gaussian in each state; without it, distances count
    last: Tensor  # (n,): the last state
    symbols: list[int]

    def costs(self, heard: Tensor) -> Tensor:
        """(L, n, longest): of each frame in each state."""
        if self.spread is None:
            return torch.cdist(heard, self.mean.flatten(0, 1)).view(len(heard), *self.mean.shape[:2])
        scaled = (heard[:, None, None] - self.mean) / self.spread
        return (0.5 * scaled.square() + self.spread.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def read(self, heard: Tensor, penalty: float) -> list[int]:
        """The symbols of the cheapest way for frames (L, features), on which each word costs the penalty.

        Each frame lies on a state: that of the frame before, one or two further, or, when a word has ended,
        on the first or second of another.
        """
        n, longest, _ = self.mean.shape
        total = torch.full((n, longest + 2), torch.inf)  # two more in front, for what comes from before
        begun = torch.zeros(n, longest + 2, dtype=torch.long)
        until, ends = 0.0, []
        for t, cost in enumerate(self.costs(heard)):
            total[:, 1], begun[:, 1] = until + penalty, t
            came, which = _three(total).min(0)
            begun[:, 2:] = _three(begun).gather(0, which[None])[0]
            total[:, 2:] = came + cost
            at_end = total[:, 2:].gather(1, self.last[:, None])[:, 0]
            word = int(at_end.argmin())
            until = at_end[word].item()
            ends.append((word, int(begun[word, 2 + self.last[word]])))
        return self._back(ends)

    def _back(self, ends: list[tuple[int, int]]) -> list[int]:
        """For each frame the best word that ends there, and where it begins -> the words of the whole."""
        found, t = [], len(ends) - 1
        while t >= 0:
            word, begin = ends[t]
            found.append(self.symbols[word])
            t = begin - 1
        return found[::-1]


def _three(x: Tensor) -> Tensor:
    """(3, n, longest): the same place, one before, two before."""
    return torch.stack([x[:, 2:], x[:, 1:-1], x[:, :-2]])


def of_recordings(frames: list[Tensor], symbols: Tensor) -> Templates:
    """Each recording is a template, each frame a state."""
    last = torch.tensor([len(own) for own in frames]) - 1
    return Templates(pad_sequence(frames, batch_first=True), None, last, symbols.tolist())


def of_words(frames: list[Tensor], symbols: Tensor, states: int, rounds: int = 3) -> Templates:
    """A hidden Markov model for each symbol, from left to right, with a Gaussian in each state.

    Frames begin in equal shares and then go to the states where they are the most probable, some rounds.
    """
    words = sorted(set(symbols.tolist()))
    made = []
    for word in words:
        own = [frames[i] for i in (symbols == word).nonzero()[:, 0].tolist()]
        places = [torch.arange(len(one)) * states // len(one) for one in own]
        gaussians = _gaussians(torch.cat(own), torch.cat(places), states)
        for _ in range(rounds):
            places = _aligned(_one(gaussians), own)
            gaussians = _gaussians(torch.cat(own), torch.cat(places), states)
        made.append(gaussians)
    mean, spread = (torch.stack(part) for part in zip(*made, strict=True))
    return Templates(mean, spread, torch.full((len(words),), states - 1), words)


def _one(gaussians: tuple[Tensor, Tensor]) -> Templates:
    mean, spread = gaussians
    return Templates(mean[None], spread[None], torch.tensor([len(mean) - 1]), [0])


def _gaussians(frames: Tensor, places: Tensor, states: int) -> tuple[Tensor, Tensor]:
    """Mean and spread (states, features) of the frames on each state; of all where those are too few."""
    whole = torch.std_mean(frames, 0)
    by_place = (frames[places == state] for state in range(states))
    found = [torch.std_mean(own, 0) if len(own) > 1 else whole for own in by_place]
    return torch.stack([mean for _, mean in found]), torch.stack([s.clamp_min(NARROWEST) for s, _ in found])


def _aligned(word: Templates, frames: list[Tensor]) -> list[Tensor]:
    """For each recording, the states (L,) of its frames on the cheapest way from the first to the last."""
    padded = pad_sequence(frames, batch_first=True)
    costs = word.costs(padded.flatten(0, 1))[:, 0].unflatten(0, padded.shape[:2])  # (n, longest, states)
    total = torch.full((len(frames), costs.shape[2] + 2), torch.inf)
    total[:, 1] = 0.0
    steps = []
    for cost in costs.unbind(1):
        came, which = _three(total).min(0)
        total[:, :2] = torch.inf  # begin once
        total[:, 2:] = came + cost
        steps.append(which)
    back = torch.stack(steps, 1).tolist()
    return [_places(own[: len(one)]) for own, one in zip(back, frames, strict=True)]


def _places(back: list[list[int]]) -> Tensor:
    """From how many states before each state was reached, frame by frame -> the state of each frame."""
    place, found = len(back[0]) - 1, []
    for steps in reversed(back):
        found.append(place)
        place -= steps[place]
    return torch.tensor(found[::-1])
