"""N-gram language models with interpolated modified Kneser-Ney smoothing.

An n-gram is stored as one integer, its code: (the id of its first n - 1 tokens) * vocabulary + its
last token. All n-grams of one length form a sorted array of codes, so that one call of
`searchsorted` looks up all n-grams of a text.
"""

# nltk.lm is not used: with one discount per order it gives other scores, and a token takes milliseconds.

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
    counts: Floats  # count of each n-gram minus its discount
    totals: Floats  # for each context: the sum of the counts of its n-grams, undiscounted
    discounted: Floats  # for each context: the sum of the discounts of its n-grams


class NGrams:
    """An n-gram model: predicts each token's probability from the `order` - 1 tokens before it.

    The probabilities are smoothed as in Chen and Goodman (1998).
    """

    def __init__(self, tokens: Numbers, vocabulary: int, order: int = 5) -> None:
        self.vocabulary = vocabulary
        tables = _tables(tokens, vocabulary, order)
        self.orders = []
        for n, (codes, ids, _) in enumerate(tables, 1):
            if n == order:
                counts = np.bincount(ids[ids != UNSEEN], minlength=len(codes))
            else:  # Kneser-Ney: count the distinct tokens before an n-gram, not its occurrences
                counts = np.bincount(ids[tables[n][2]], minlength=len(codes))
            self.orders.append(_order(codes, counts, vocabulary))

    def bits(self, tokens: Numbers) -> Floats:
        """Returns -log2 of each token's probability given the tokens before it, (len(tokens),)."""
        probabilities = np.full(len(tokens), 1 / self.vocabulary)
        context = np.zeros(len(tokens), np.int64)  # id of the (n - 1)-gram before each token; starts at n = 1
        for order in self.orders:
            probabilities = _interpolated(order, context, tokens, self.vocabulary, probabilities)
            context = _shifted(_lookup(order.codes, context, tokens, self.vocabulary))
        bits: Floats = -np.log2(probabilities)
        return bits


def _tables(tokens: Numbers, vocabulary: int, order: int) -> list[tuple[Numbers, Numbers, Numbers]]:
    """Returns, for each n from 1 to `order`, three arrays that describe the n-grams of `tokens`.

    The first array has the sorted codes of the distinct n-grams. The second has, for each token,
    the id of the n-gram that ends with this token, or -1. The third has, for each distinct
    n-gram, the index of the token with which it first ends.
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
    """Returns the discounts (3,) of n-grams that occur once, twice, and three times or more.

    counts_of_counts[c] is the number of n-grams that occur c times.
    """
    one, two, three, four = np.maximum(counts_of_counts[1:5], 1)
    share = one / (one + 2 * two)
    discounts = [1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three]
    clipped: Floats = np.clip(discounts, 0.05, [0.95, 1.95, 2.95])
    return clipped


def _interpolated(order: _Order, context: Numbers, tokens: Numbers, vocabulary: int, lower: Floats) -> Floats:
    """Returns the probability of each token given its context, interpolated with `lower`.

    `lower` has the probability of each token given a context that is shorter by one token.
    """
    known = (context != UNSEEN) & (context < len(order.totals))
    row = np.where(known, context, 0)
    known &= order.totals[row] > 0
    ids = _lookup(order.codes, np.where(known, context, UNSEEN), tokens, vocabulary)
    counts = np.where(ids != UNSEEN, order.counts[ids], 0.0)
    total = np.where(known, order.totals[row], 1.0)
    mixed: Floats = np.where(known, (counts + order.discounted[row] * lower) / total, lower)
    return mixed


def _lookup(codes: Numbers, context: Numbers, tokens: Numbers, vocabulary: int) -> Numbers:
    """Returns the id of each n-gram (context id, last token), or -1 if it is not in `codes`."""
    query = context * vocabulary + tokens
    index = np.minimum(np.searchsorted(codes, query), len(codes) - 1)
    return np.where((context != UNSEEN) & (codes[index] == query), index, UNSEEN)
