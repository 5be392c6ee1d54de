"""N-grams of tokens with interpolated Kneser-Ney smoothing: the baseline of language models.

An n-gram is numbered by the number of its first n - 1 tokens and its last token, so a table of each order is
two sorted arrays, and a whole text is looked up at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
UNSEEN = -1


class _Order(NamedTuple):
    """What is known of the n-grams of one length."""

    codes: Numbers  # sorted: number of the context * vocabulary + last token
    counts: Floats  # less the discount, of each n-gram
    totals: Floats  # by context: all counts of it
    kept_back: Floats  # by context: what the discount took


class NGrams:
    """Chances of tokens after the `order` - 1 before them (modified Kneser-Ney; Chen and Goodman, 1998)."""

    def __init__(self, tokens: Numbers, vocabulary: int, order: int = 5) -> None:
        self.vocabulary = vocabulary
        seen = _numbered(tokens, vocabulary, order)
        self.orders = []
        for n, (codes, ids, _) in enumerate(seen, 1):
            if n == order:
                counts = np.bincount(ids[ids != UNSEEN], minlength=len(codes))
            else:  # in how many contexts an n-gram was seen, not how often
                counts = np.bincount(ids[seen[n][2]], minlength=len(codes))
            self.orders.append(_order(codes, counts, vocabulary))

    def bits(self, tokens: Numbers) -> Floats:
        """Of each token after those before it, (n,)."""
        chances = np.full(len(tokens), 1 / self.vocabulary)
        context = np.zeros(len(tokens), np.int64)  # the number of the n - 1 tokens before each
        for order in self.orders:
            chances = _mixed(order, context, tokens, self.vocabulary, chances)
            context = _shifted(_after(order.codes, context, tokens, self.vocabulary))
        bits: Floats = -np.log2(chances)
        return bits


def _numbered(tokens: Numbers, vocabulary: int, order: int) -> list[tuple[Numbers, Numbers, Numbers]]:
    """For n from 1 to `order`: the codes, the number of the n-gram that ends at each token, first places."""
    found, context = [], np.zeros(len(tokens), np.int64)
    for _ in range(order):
        inside = context != UNSEEN
        codes, first, ids = np.unique((context * vocabulary + tokens)[inside], True, True)
        numbers = np.full(len(tokens), UNSEEN)
        numbers[inside] = ids
        found.append((codes, numbers, inside.nonzero()[0][first]))
        context = _shifted(numbers)
    return found


def _shifted(numbers: Numbers) -> Numbers:
    return np.concatenate([[UNSEEN], numbers[:-1]])


def _order(codes: Numbers, counts: Numbers, vocabulary: int) -> _Order:
    how_many = np.bincount(counts, minlength=5)[:5].astype(float)
    discounts = np.concatenate([[0.0], _discounts(how_many)])
    taken = discounts[np.minimum(counts, 3)]
    context = codes // vocabulary
    totals, kept_back = (np.bincount(context, part).astype(float) for part in (counts, taken))
    return _Order(codes, counts - taken, totals, kept_back)


def _discounts(how_many: Floats) -> Floats:
    """What is taken from counts of 1, of 2, and of 3 and more, by how many n-grams have counts 0 to 4."""
    one, two, three, four = np.maximum(how_many[1:5], 1)
    share = one / (one + 2 * two)
    taken = [1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three]
    clipped: Floats = np.clip(taken, 0.05, [0.95, 1.95, 2.95])
    return clipped


def _mixed(order: _Order, context: Numbers, tokens: Numbers, vocabulary: int, lower: Floats) -> Floats:
    """The chances with one token more of context, given those with less."""
    known = (context != UNSEEN) & (context < len(order.totals))
    at = np.where(known, context, 0)
    known &= order.totals[at] > 0
    number = _after(order.codes, np.where(known, context, UNSEEN), tokens, vocabulary)
    own = np.where(number != UNSEEN, order.counts[number], 0.0)
    total = np.where(known, order.totals[at], 1.0)
    mixed: Floats = np.where(known, (own + order.kept_back[at] * lower) / total, lower)
    return mixed


def _after(codes: Numbers, context: Numbers, tokens: Numbers, vocabulary: int) -> Numbers:
    """The number of each n-gram."""
    wanted = context * vocabulary + tokens
    place = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    return np.where((context != UNSEEN) & (codes[place] == wanted), place, UNSEEN)
