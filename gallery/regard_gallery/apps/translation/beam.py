"""Beam search."""

# By hand: the beam search of Transformers runs only on its own model classes and caches.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._checks import count

Step = Callable[[Tensor, Tensor], Tensor]


class Written(NamedTuple):
    tokens: list[int]  # without start and end
    score: float  # the log-probability, with the end


def beam_search(
    step: Step, samples: int, *, start: int, end: int, width: int, longest: int, penalty: float = 0.0
) -> list[Written]:
    """Returns the best sequence of each sample.

    Args:
        step: `step(tokens, parents)`, both (samples * width,), returns the log-probabilities of the
            next token, (samples * width, words). Row i continues row parents[i] of the previous
            step and reads tokens[i]. Rows of a sample are adjacent. In the first call, parents[i]
            is i.
        samples: the number of samples.
        start, end: the tokens before and after every sequence.
        width: the number of beams per sample; 1 is greedy search.
        longest: the most tokens of a sequence, including the end.
        penalty: the best beam has the largest score / length ** penalty; more than 0 favours long
            sequences.
    """
    count("samples", samples, 1)
    count("width", width, 1)
    count("longest", longest, 1)
    first = torch.arange(samples)[:, None] * width  # each sample's first row
    parents = first + torch.arange(width)
    tokens = torch.full((samples, width, 1), start)
    scores = torch.full((samples, width), -torch.inf)
    scores[:, 0] = 0.0  # all beams start equal, so only the first may continue
    for position in range(longest):
        log_probs = step(tokens[..., -1].flatten(), parents.flatten()).view(samples, width, -1)
        log_probs = _only_end(log_probs, tokens[..., -1] == end, position == longest - 1, end)
        scores, chosen = (scores[..., None] + log_probs).flatten(1).topk(width)  # (samples, width)
        parents = first + chosen // log_probs.shape[-1]
        following = chosen % log_probs.shape[-1]
        tokens = torch.cat([tokens.flatten(0, 1)[parents], following[..., None]], -1)
        if bool((following == end).all()):
            break
    return _best(tokens[..., 1:], scores, end, penalty)


def _only_end(log_probs: Tensor, ended: Tensor, last: bool, end: int) -> Tensor:
    """Forces the end at the last position and, at no cost, after an end."""
    others = torch.arange(log_probs.shape[-1]) != end
    free = log_probs.masked_fill(ended[..., None], 0.0)
    return free.masked_fill((ended[..., None] | last) & others, -torch.inf)


def _best(tokens: Tensor, scores: Tensor, end: int, penalty: float) -> list[Written]:
    lengths = (tokens != end).sum(-1) + 1
    best = (scores / lengths**penalty).argmax(1)
    beams = zip(tokens, scores, lengths, best.tolist(), strict=True)
    return [Written(beam[i, : n[i] - 1].tolist(), float(score[i])) for beam, score, n, i in beams]
