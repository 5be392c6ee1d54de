"""Baseline recognisers of connected words. They assign the frames of a recording to states of word
templates at the lowest total cost. A template is a recording (dynamic time warping) or a hidden
Markov model.
"""

# No library is used: hmmlearn also re-estimates transitions, which gives other scores, and neither hmmlearn
# nor tslearn recognises connected words.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

NARROWEST = 0.1  # lower limit of the standard deviation in a state; that of all training frames is 1


class Templates(NamedTuple):
    """Templates of words. A template is a sequence of states, each with a mean frame."""

    mean: Tensor  # (n, longest, features): the mean frame of each state; n templates
    spread: Tensor | None  # same shape: standard deviations of the states; None: costs are distances
    last: Tensor  # (n,): the index of each template's last state
    symbols: list[int]  # the symbol of each template

    def costs(self, heard: Tensor) -> Tensor:
        """Returns the cost (L, n, longest) of assigning each frame (L, features) to each state.

        There are n templates with at most `longest` states. The cost is a negative log density, or
        a distance if `spread` is None.
        """
        if self.spread is None:
            return torch.cdist(heard, self.mean.flatten(0, 1)).view(len(heard), *self.mean.shape[:2])
        scaled = (heard[:, None, None] - self.mean) / self.spread
        return (0.5 * scaled.square() + self.spread.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def read(self, heard: Tensor, penalty: float) -> list[int]:
        """Recognises the words in frames (L, features) and returns their symbols.

        The Viterbi algorithm finds the path of least cost, which assigns a state of a word to each
        frame. Each word adds `penalty` to the cost. From one frame to the next, the path stays in
        its state or advances by one or two states. From the last state of a word, the path may
        enter the first or second state of any word.
        """
        n, longest, _ = self.mean.shape
        # Cost of the best path that ends in each state. The first two columns are for entering a word.
        total = torch.full((n, longest + 2), torch.inf)
        begun = torch.zeros(n, longest + 2, dtype=torch.long)
        best, ends = 0.0, []
        for t, cost in enumerate(self.costs(heard)):
            total[:, 1], begun[:, 1] = best + penalty, t
            cheapest, move = _moves(total).min(0)
            begun[:, 2:] = _moves(begun).gather(0, move[None])[0]
            total[:, 2:] = cheapest + cost
            at_end = total[:, 2:].gather(1, self.last[:, None])[:, 0]
            word = int(at_end.argmin())
            best = at_end[word].item()
            ends.append((word, int(begun[word, 2 + self.last[word]])))
        return self._backtrace(ends)

    def _backtrace(self, ends: list[tuple[int, int]]) -> list[int]:
        """Returns the symbols of the best path.

        ends[t] is a pair: the template of the best word that ends at frame t, and the frame at
        which this word begins.
        """
        symbols, t = [], len(ends) - 1
        while t >= 0:
            word, begin = ends[t]
            symbols.append(self.symbols[word])
            t = begin - 1
        return symbols[::-1]


def _moves(x: Tensor) -> Tensor:
    """Returns (3, n, longest): entry (m, w, s) is x at state s - m of word w.

    A move into state s stays (m = 0), advances by one state (m = 1) or by two (m = 2), so that it
    comes from state s - m. x (n, longest + 2) has two columns for entering a word, and then a
    column for each state.
    """
    return torch.stack([x[:, 2:], x[:, 1:-1], x[:, :-2]])


def of_recordings(frames: list[Tensor], symbols: Tensor) -> Templates:
    """Returns a template for each recording, with a state for each frame."""
    last = torch.tensor([*map(len, frames)]) - 1
    return Templates(pad_sequence(frames, batch_first=True), None, last, symbols.tolist())


def of_words(frames: list[Tensor], symbols: Tensor, states: int, rounds: int = 3) -> Templates:
    """Returns a template for each symbol: a left-to-right hidden Markov model.

    Each of the `states` states has a Gaussian, fitted to the symbol's recordings. Frames are first
    divided evenly among the states. Each round then assigns frames to the states of their most
    probable path (Viterbi training).
    """
    words = sorted(set(symbols.tolist()))
    models = []
    for word in words:
        recordings = [frames[i] for i in (symbols == word).nonzero()[:, 0].tolist()]
        path = torch.cat([torch.arange(len(x)) * states // len(x) for x in recordings])
        gaussians = _gaussians(torch.cat(recordings), path, states)
        for _ in range(rounds):
            path = torch.cat(_paths(_template(gaussians), recordings))
            gaussians = _gaussians(torch.cat(recordings), path, states)
        models.append(gaussians)
    mean, spread = map(torch.stack, zip(*models, strict=True))
    return Templates(mean, spread, torch.full((len(words),), states - 1), words)


def _template(gaussians: tuple[Tensor, Tensor]) -> Templates:
    mean, spread = gaussians
    return Templates(mean[None], spread[None], torch.tensor([len(mean) - 1]), [0])


def _gaussians(frames: Tensor, path: Tensor, states: int) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of the frames in each state, both (states, features).

    path[i] is the state of frame i. A state with fewer than two frames gets the mean and deviation
    of all frames.
    """
    overall = torch.std_mean(frames, 0)
    by_state = (frames[path == state] for state in range(states))
    fits = [torch.std_mean(x, 0) if len(x) > 1 else overall for x in by_state]
    return torch.stack([mean for _, mean in fits]), torch.stack([s.clamp_min(NARROWEST) for s, _ in fits])


def _paths(word: Templates, recordings: list[Tensor]) -> list[Tensor]:
    """Finds each recording's path of least cost through `word` (Viterbi).

    Returns a tensor (L,) per recording of L frames: the state of each frame on the path.
    """
    padded = pad_sequence(recordings, batch_first=True)
    costs = word.costs(padded.flatten(0, 1))[:, 0].unflatten(0, padded.shape[:2])  # (n, longest, states)
    total = torch.full((len(recordings), costs.shape[2] + 2), torch.inf)
    total[:, 1] = 0.0
    moves = []
    for cost in costs.unbind(1):
        cheapest, move = _moves(total).min(0)
        total[:, :2] = torch.inf  # later frames cannot enter the word
        total[:, 2:] = cheapest + cost
        moves.append(move)
    by_recording = torch.stack(moves, 1).tolist()
    return [_states(steps[: len(x)]) for steps, x in zip(by_recording, recordings, strict=True)]


def _states(moves: list[list[int]]) -> Tensor:
    """Backtraces the Viterbi path from the last state. Returns the state of each frame, (L,).

    moves[frame][state] is the number of states by which the best path advanced to reach `state` at
    `frame`.
    """
    state, states = len(moves[0]) - 1, []
    for by_state in reversed(moves):
        states.append(state)
        state -= by_state[state]
    return torch.tensor(states[::-1])
