"""N-gram language models with interpolated modified Kneser-Ney smoothing.

The code of an n-gram is (the id of its first n - 1 tokens) * vocabulary + its last token. The table
of an order is therefore a sorted array of codes, and a lookup of a whole text is one binary search.
"""

# By hand: nltk.lm has one discount per order (other scores), and takes milliseconds per token.

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
UNSEEN = -1


class _Order(NamedTuple):
    """The n-grams of one length. The id of an n-gram is its index in `codes`."""

    codes: Numbers  # sorted: id of the context * vocabulary + last token
    counts: Floats  # of each n-gram, minus the discount
    totals: Floats  # by context: the sum of its counts
    discounted: Floats  # by context: the sum of its discounts


class NGrams:
    """Probabilities of tokens given the `order` - 1 tokens before them (Chen and Goodman, 1998)."""

    def __init__(self, tokens: Numbers, vocabulary: int, order: int = 5) -> None:
        self.vocabulary = vocabulary
        tables = _tables(tokens, vocabulary, order)
        self.orders = []
        for n, (codes, ids, _) in enumerate(tables, 1):
            if n == order:
                counts = np.bincount(ids[ids != UNSEEN], minlength=len(codes))
            else:  # count the distinct tokens before an n-gram, not its occurrences
                counts = np.bincount(ids[tables[n][2]], minlength=len(codes))
            self.orders.append(_order(codes, counts, vocabulary))

    def bits(self, tokens: Numbers) -> Floats:
        """Computes the bits of each token (n,) given the tokens before it."""
        probabilities = np.full(len(tokens), 1 / self.vocabulary)
        context = np.zeros(len(tokens), np.int64)  # the id of the n - 1 tokens before each token
        for order in self.orders:
            probabilities = _interpolated(order, context, tokens, self.vocabulary, probabilities)
            context = _shifted(_lookup(order.codes, context, tokens, self.vocabulary))
        bits: Floats = -np.log2(probabilities)
        return bits


def _tables(tokens: Numbers, vocabulary: int, order: int) -> list[tuple[Numbers, Numbers, Numbers]]:
    """Returns three arrays for each n from 1 to `order`.

    These are the sorted codes, the id of the n-gram that ends at each token, and the index of each
    n-gram's first occurrence.
    """
    tables, context = [], np.zeros(len(tokens), np.int64)
    for _ in range(order):
        complete = context != UNSEEN
        codes, first, inverse = np.unique((context * vocabulary + tokens)[complete], True, True)
        ids = np.full(len(tokens), UNSEEN)
        ids[complete] = inverse
        tables.append((codes, ids, complete.nonzero()[0][first]))
        context = _shifted(ids)
    return tables


def _shifted(ids: Numbers) -> Numbers:
    return np.concatenate([[UNSEEN], ids[:-1]])


def _order(codes: Numbers, counts: Numbers, vocabulary: int) -> _Order:
    counts_of_counts = np.bincount(counts, minlength=5)[:5].astype(float)
    discounts = np.concatenate([[0.0], _discounts(counts_of_counts)])[np.minimum(counts, 3)]
    context = codes // vocabulary
    totals, discounted = (np.bincount(context, x).astype(float) for x in (counts, discounts))
    return _Order(codes, counts - discounts, totals, discounted)


def _discounts(counts_of_counts: Floats) -> Floats:
    """Computes the discounts of counts 1, 2 and >= 3 from the numbers of n-grams by count."""
    one, two, three, four = np.maximum(counts_of_counts[1:5], 1)
    share = one / (one + 2 * two)
    discounts = [1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three]
    clipped: Floats = np.clip(discounts, 0.05, [0.95, 1.95, 2.95])
    return clipped


def _interpolated(order: _Order, context: Numbers, tokens: Numbers, vocabulary: int, lower: Floats) -> Floats:
    """Interpolates one order with `lower`, the probabilities from contexts shorter by one token."""
    known = (context != UNSEEN) & (context < len(order.totals))
    row = np.where(known, context, 0)
    known &= order.totals[row] > 0
    ids = _lookup(order.codes, np.where(known, context, UNSEEN), tokens, vocabulary)
    counts = np.where(ids != UNSEEN, order.counts[ids], 0.0)
    total = np.where(known, order.totals[row], 1.0)
    mixed: Floats = np.where(known, (counts + order.discounted[row] * lower) / total, lower)
    return mixed


def _lookup(codes: Numbers, context: Numbers, tokens: Numbers, vocabulary: int) -> Numbers:
    """Returns the id of each n-gram, or UNSEEN."""
    query = context * vocabulary + tokens
    index = np.minimum(np.searchsorted(codes, query), len(codes) - 1)
    return np.where((context != UNSEEN) & (codes[index] == query), index, UNSEEN)
