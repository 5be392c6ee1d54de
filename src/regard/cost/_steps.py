"""Visible pairs and travelling keys of each rank and step of a ring, for thousands of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..distributed._pairs import PairCounter, mask_sizes
from ..distributed.layouts import Layout
from ..masks import Mask, Window

CHUNK = 2**18  # rectangles that are counted at once
ONE_BY_ONE = 2**16  # rectangles of masks other than windows


@dataclass(frozen=True)
class Steps:
    """The steps of a ring, [step, rank], for one head of one sample.

    In a step, a rank computes with the keys of the rank that is `step` before it.
    """

    pairs: Tensor  # visible pairs that the rank computes
    tokens: Tensor  # tokens whose keys the rank receives; 0 in step 0

    @classmethod
    def of(cls, mask: Mask | None, layout: Layout) -> Steps:
        check_countable(mask, layout)
        pairs, tokens = zip(*_chunks(mask, layout), strict=True)
        received = torch.cat(tokens)
        received[0] = 0
        return cls(torch.cat(pairs), received)

    def sent(self, step: int) -> Tensor:
        """Returns the tokens of each rank whose keys leave it before a step."""
        return self.tokens[step].roll(-step)

    @cached_property
    def exchanged(self) -> tuple[Tensor, Tensor]:
        """The tokens that each rank receives in all steps, and those that it sends."""
        return self.tokens.sum(0), sum(map(self.sent, range(1, len(self.tokens))), self.tokens[0])

    @cached_property
    def peers(self) -> tuple[Tensor, Tensor]:
        """The numbers of ranks from which each rank receives tokens, and to which it sends tokens."""
        sent = (self.sent(step) > 0 for step in range(1, len(self.tokens)))
        return (self.tokens > 0).sum(0), sum(sent, self.tokens[0])

    def clock(self, pair: float, token: float, message: float, gradients: bool) -> Tensor:
        """Returns the seconds after which each rank ends, by simulation of the steps.

        The keys of the next step travel while a rank computes, and with `gradients` also the
        gradients of the step before. Both ends of a message wait for each other.

        Args:
            pair, token: seconds to compute a visible pair, and to receive a token.
            message: seconds of the messages of a step besides their bytes.
        """
        R, zeros = len(self.pairs), torch.zeros_like(self.pairs[0], dtype=torch.float64)

        def travel(step: int) -> Tensor:
            if not 0 < step < R:
                return zeros
            return self.tokens[step].double() * token + (self.tokens[step] > 0).double() * message

        clock = zeros
        for step in range(R + gradients):
            arriving = travel(step + 1)
            if gradients:
                arriving = arriving + travel(step - 1).roll(1 - step)
            posted = torch.maximum(clock, clock.roll(step + 1))
            arrival = torch.where(arriving > 0, posted + arriving, 0)
            computed = clock + self.pairs[step].double() * pair if step < R else clock
            clock = torch.maximum(computed, torch.maximum(arrival, arrival.roll(-step - 1)))
        return clock


def check_countable(mask: Mask | None, layout: Layout) -> None:
    if mask is None or isinstance(mask, Window):
        return
    if mask_sizes(mask) != (1, 1):
        raise ValueError("mask: expected the same mask for all samples and heads, got different ones")
    rectangles = sum(map(len, layout.runs)) ** 2
    if rectangles > ONE_BY_ONE:
        raise ValueError(
            f"ranks: expected at most {ONE_BY_ONE:,} pairs of runs with a mask that is no window, "
            f"got {rectangles:,} with {layout.ranks} ranks"
        )


def _chunks(mask: Mask | None, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs and tokens [step, rank] of some consecutive steps."""
    R, most = layout.ranks, max(map(len, layout.runs))
    runs = torch.zeros(2, most, R, dtype=torch.int64)  # begins and ends; other runs are empty
    for rank, own in enumerate(layout.runs):
        runs[:, : len(own), rank] = torch.tensor(own).view(-1, 2).T
    at_once = max(1, CHUNK // (R * most**2))
    for first in range(0, R, at_once):
        steps = torch.arange(first, min(first + at_once, R))
        keys = runs[:, :, (torch.arange(R) - steps[:, None]) % R]
        pairs = _visible(mask, layout.L, runs[:, :, None, None], keys[:, None])  # [queries, keys, step, rank]
        yield pairs.sum((0, 1)), ((keys[1] - keys[0]) * (pairs > 0).any(0)).sum(0)


def _visible(mask: Mask | None, L: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Returns the number of visible pairs of rectangles; dim 0 is (begin, end)."""
    if not (mask is None or isinstance(mask, Window)):
        return _counted(mask, L, queries, keys)
    pairs = (queries[1] - queries[0]) * (keys[1] - keys[0])
    if mask is not None and mask.right is not None:
        pairs = _at_most(min(mask.right, L), queries, keys)
    if mask is not None and mask.left is not None:
        pairs -= _at_most(-min(mask.left, L) - 1, queries, keys)
    return pairs


def _at_most(reach: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Returns the number of pairs with key - query <= reach."""

    def triangle(side: Tensor) -> Tensor:
        side = side.add_(reach).clamp_(min=0)
        return (side + 1).mul_(side).bitwise_right_shift_(1)

    (q0, q1), (k0, k1) = queries, keys
    pairs = triangle(q1 - k0).sub_(triangle(q0 - k0))
    return pairs.sub_(triangle(q1 - k1)).add_(triangle(q0 - k1))


def _counted(mask: Mask, L: int, queries: Tensor, keys: Tensor) -> Tensor:
    counter = PairCounter.of(mask, L)
    rectangles = torch.stack(torch.broadcast_tensors(*queries, *keys), -1)
    pairs = [counter.pairs((a, b), (c, d)) for a, b, c, d in rectangles.view(-1, 4).tolist()]
    return torch.tensor(pairs).view(rectangles.shape[:-1])
