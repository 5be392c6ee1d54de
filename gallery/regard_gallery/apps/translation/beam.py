"""Beam search: several sequences are written at the same time, and the best is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._checks import count

Step = Callable[[Tensor, Tensor], Tensor]


class Written(NamedTuple):
    tokens: list[int]  # between start and end
    score: float  # the log of the chance, the end included


def beam_search(
    step: Step, samples: int, *, start: int, end: int, width: int, longest: int, penalty: float = 0.0
) -> list[Written]:
    """For each sample the best of `width` sequences, of at most `longest` tokens with the end.

    Args:
        step: `step(tokens, parents)`, both (samples * width,): row i goes on from what row parents[i] was,
            and reads tokens[i]. Returns log-chances of the next token, (samples * width, words). The rows
            of a sample stand together. In the first call each row is its own parent.
        samples: how many are searched at the same time.
        start, end: the tokens that stand before and after a sequence.
        width: how many sequences of a sample are kept; 1 is greedy.
        longest: the last of these tokens must be the end.
        penalty: the best of those that were kept is by score / length ** penalty, which favours long ones.
    """
    count("samples", samples, 1)
    count("width", width, 1)
    count("longest", longest, 1)
    first = torch.arange(samples)[:, None] * width  # row of each sample
    parents = first + torch.arange(width)
    tokens = torch.full((samples, width, 1), start)
    scores = torch.full((samples, width), -torch.inf)
    scores[:, 0] = 0.0  # at first the others would repeat it
    for place in range(longest):
        chances = step(tokens[..., -1].flatten(), parents.flatten()).view(samples, width, -1)
        chances = _only_end(chances, tokens[..., -1] == end, place == longest - 1, end)
        scores, chosen = (scores[..., None] + chances).flatten(1).topk(width)  # (samples, width)
        parents = first + chosen // chances.shape[-1]
        following = chosen % chances.shape[-1]
        tokens = torch.cat([tokens.flatten(0, 1)[parents], following[..., None]], -1)
        if bool((following == end).all()):
            break
    return _best(tokens[..., 1:], scores, end, penalty)


def _only_end(chances: Tensor, ended: Tensor, last: bool, end: int) -> Tensor:
    """After an end there are only ends, for nothing; in the last place there is only the end."""
    others = torch.arange(chances.shape[-1]) != end
    free = chances.masked_fill(ended[..., None], 0.0)
    return free.masked_fill((ended[..., None] | last) & others, -torch.inf)


def _best(tokens: Tensor, scores: Tensor, end: int, penalty: float) -> list[Written]:
    lengths = (tokens != end).sum(-1) + 1
    best = (scores / lengths**penalty).argmax(1)
    rows = zip(tokens, scores, lengths, best.tolist(), strict=True)
    return [Written(own[i, : n[i] - 1].tolist(), float(score[i])) for own, score, n, i in rows]
