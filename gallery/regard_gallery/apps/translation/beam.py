"""Beam search over any function that returns next-token log-probabilities."""

# Transformers' beam search is not used, because it needs Transformers' model classes and caches.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._checks import count

Step = Callable[[Tensor, Tensor], Tensor]


class Written(NamedTuple):
    tokens: list[int]  # without the start and end tokens
    score: float  # the log-probability of the tokens and the end token


def beam_search(
    step: Step, samples: int, *, start: int, end: int, width: int, longest: int, penalty: float = 0.0
) -> list[Written]:
    """Returns the best sequence of each sample.

    Args:
        step: `step(tokens, parents)` returns the log-probabilities of the next token, (samples *
            width, words), where `words` is the size of the vocabulary. Both arguments are (samples
            * width,). Row i is the sequence in row parents[i] of the previous call, followed by
            tokens[i]. Rows of a sample are adjacent. In the first call, parents[i] is i.
        samples: the number of samples.
        start, end: the tokens that begin and end every sequence. Results contain neither.
        width: the number of beams per sample; 1 is greedy search.
        longest: the maximal number of tokens of a sequence, including `end`.
        penalty: the best beam is the one with the largest score / length ** penalty. Values above 0
            favour long sequences.
    """
    count("samples", samples, 1)
    count("width", width, 1)
    count("longest", longest, 1)
    first = torch.arange(samples)[:, None] * width  # (samples, 1): the first row of each sample
    parents = first + torch.arange(width)
    tokens = torch.full((samples, width, 1), start)
    scores = torch.full((samples, width), -torch.inf)
    scores[:, 0] = 0.0  # all beams start equal, so the first step extends only the first one
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
    """Returns log_probs (samples, width, words), in which a beam that has ended only repeats `end`.

    For a beam that has ended, `end` has log-probability 0 and every other token -inf. If `last`,
    the other tokens are -inf for all beams, so that every beam ends.
    """
    others = torch.arange(log_probs.shape[-1]) != end
    free = log_probs.masked_fill(ended[..., None], 0.0)
    return free.masked_fill((ended[..., None] | last) & others, -torch.inf)


def _best(tokens: Tensor, scores: Tensor, end: int, penalty: float) -> list[Written]:
    lengths = (tokens != end).sum(-1) + 1
    best = (scores / lengths**penalty).argmax(1)
    beams = zip(tokens, scores, lengths, best.tolist(), strict=True)
    return [Written(beam[i, : n[i] - 1].tolist(), float(score[i])) for beam, score, n, i in beams]
