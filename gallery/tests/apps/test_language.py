"""Language models: n-grams against their definition, bits per byte, and generation with a cache."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest

pytest.importorskip("tokenizers")

import numpy as np
import torch
import torch.nn.functional as F

from regard_gallery import apps
from regard_gallery.apps._parts import ngram as _ngram
from regard_gallery.apps._parts.decoder import Decoder, write
from regard_gallery.apps._parts.language import by_doubling, count_bytes
from regard_gallery.apps._parts.ngram import NGrams
from regard_gallery.models.generate import Sampling
from support.apps import needs

NAMES = ("plays", "source")
Gram = tuple[int, ...]


# N-grams


class SlowNGrams:
    """Modified Kneser-Ney smoothing with dictionaries, as Chen and Goodman define it."""

    def __init__(self, tokens: list[int], vocabulary: int, order: int) -> None:
        self.vocabulary, self.order = vocabulary, order
        grams = {
            n: [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for n in range(1, order + 1)
        }
        self.counts: dict[int, Counter[Gram]] = {order: Counter(grams[order])}
        for n in range(1, order):
            self.counts[n] = Counter(gram[1:] for gram in set(grams[n + 1]))
        self.discounts = {n: self._discounts(counts) for n, counts in self.counts.items()}
        self.followers: dict[Gram, list[int]] = defaultdict(list)
        for counts in self.counts.values():
            for gram in counts:
                self.followers[gram[:-1]].append(gram[-1])

    def _discounts(self, counts: Counter[Gram]) -> list[float]:
        count_of_counts = Counter(counts.values())
        one, two, three, four = (max(1, count_of_counts[i]) for i in (1, 2, 3, 4))
        y = one / (one + 2 * two)
        discounts = [1 - 2 * y * two / one, 2 - 3 * y * three / two, 3 - 4 * y * four / three]
        return [0.0] + [min(max(d, 0.05), i + 0.95) for i, d in enumerate(discounts)]

    def chance(self, context: Gram, token: int) -> float:
        backoff = 1 / self.vocabulary if not context else self.chance(context[1:], token)
        counts, discounts = self.counts[len(context) + 1], self.discounts[len(context) + 1]
        follower_counts = {w: counts[(*context, w)] for w in self.followers[context] if counts[(*context, w)]}
        total = sum(follower_counts.values())
        if not total:
            return backoff
        discounted_mass = sum(discounts[min(count, 3)] for count in follower_counts.values())
        count = follower_counts.get(token, 0)
        return (count - discounts[min(count, 3)] + discounted_mass * backoff) / total


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("vocabulary", [3, 11])
def test_ngrams_equal_their_definition(order: int, vocabulary: int) -> None:
    random = np.random.default_rng(order)
    trained = random.integers(0, vocabulary, 400) * random.integers(0, 2, 400)
    tested = random.integers(0, vocabulary, 60)
    slow = SlowNGrams(trained.tolist(), vocabulary, order)
    bits = NGrams(trained, vocabulary, order).bits(tested)
    for i, token in enumerate(tested.tolist()):
        context = tuple(tested[max(0, i - order + 1) : i].tolist())
        assert bits[i] == pytest.approx(-math.log2(slow.chance(context, token)), rel=1e-12)


def test_ngram_probabilities_sum_to_one() -> None:
    random = np.random.default_rng(0)
    grams = NGrams(random.integers(0, 7, 300), 9)  # tokens 7 and 8 do not occur in the training data
    for _ in range(20):
        context = random.integers(0, 9, 4)
        probabilities = [2 ** -grams.bits(np.append(context, token))[-1] for token in range(9)]
        assert sum(probabilities) == pytest.approx(1.0)
        assert min(probabilities) > 0


def test_ngrams_learn_what_repeats() -> None:
    text = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6]), 50)
    assert NGrams(text, 10).bits(text[:80])[8:].max() < 0.2
    assert _ngram.UNSEEN not in NGrams(text, 10).orders[0].codes


# The applications


def quick(name: str, seed: int = 0) -> Any:
    needs(name)
    return apps.find(name)(quick=True, seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_documents_are_disjoint(name: str) -> None:
    app = quick(name)
    documents = [*app.tested, *app.validated, *app.trained]
    assert len(set(documents)) == len(documents) == 10
    assert app.tokenizer.decode(app.encode(app.tested).tolist()) == "".join(app.tested)
    assert quick(name, seed=1).tested != app.tested


def test_each_work_occurs_once() -> None:
    """`works` leaves out the First Folio, which contains the same plays."""
    needs("plays")
    from regard_gallery.apps.plays import works

    texts = works()
    assert len(texts) == 42
    assert sum("Who's there?" in text and "Elsinore" in text for text in texts) == 1


@pytest.mark.parametrize("name", NAMES)
def test_bits_equal_those_of_a_sequence_read_in_one_call(name: str) -> None:
    """`bits` uses all predictions of the first sequence, and the second half of later ones."""
    app = quick(name)
    torch.manual_seed(0)
    model = app.model().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    L = app.length
    tokens = app.encode(app.tested)[: 3 * L + 5]
    with torch.no_grad():
        bits = app.bits(model, tokens)
        assert len(bits) == len(tokens) - 1
        for begin, first in ((0, 0), (L // 2, L - L // 2), (L, L // 2), (2 * L, L // 2)):
            x, y = tokens[begin : begin + L], tokens[begin + 1 : begin + L + 1]
            expected = F.cross_entropy(model(x[None])[0], y, reduction="none") / math.log(2)
            later_bits = bits[begin + first : begin + L]
            assert torch.allclose(later_bits, expected[first:], rtol=1e-4, atol=1e-4)


def test_bits_per_byte_of_a_uniform_model() -> None:
    app = quick("source")
    bits = torch.full((len(app.encode(app.tested)) - 1,), math.log2(app.size))
    uniform = torch.nn.Module()
    uniform.forward = lambda x: torch.zeros(*x.shape, app.size)  # type: ignore[method-assign]
    assert app.scores(uniform)["bits per byte"] == pytest.approx(bits.sum().item() / count_bytes(app.tested))


@pytest.mark.parametrize(
    ("request_", "written", "kept"),
    [
        ("def f(x):", "\n    return x\n\n    # more", None),
        ("def f(x):", "\n    return x\n\ndef", "\n    return x\n"),
        ("    def f(self):", "\n        return 1\n    def", "\n        return 1"),
        ("    def f(self):", "\n        return 1\n\n        x", None),
    ],
)
def test_a_function_ends_where_another_begins(request_: str, written: str, kept: str | None) -> None:
    end = quick("source").ended(request_, written)
    assert (None if end is None else written[:end]) == kept


def test_means_by_doubling() -> None:
    positions, means = by_doubling(torch.arange(1.0, 9.0))
    assert means == [1.0, 2.5, 5.5]
    assert positions == pytest.approx([1.0, math.sqrt(6), math.sqrt(28)])


# The model


@pytest.mark.parametrize("near", [None, 3])
def test_writing_with_caches_equals_writing_without(near: int | None) -> None:
    torch.manual_seed(0)
    model = Decoder(50, near=near).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    prompt = [7, 3, 11, 5, 2]
    written = list(write(model, prompt, Sampling(max_tokens=20)))
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(20):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert written == tokens[5:]


def test_reach_of_near_and_far_layers() -> None:
    """With near=3, layer 0 attends to the 3 tokens before a query, and layer 1 to all tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(50, (1, 20))
    changed_tokens = tokens.clone()
    changed_tokens[0, 0] = (tokens[0, 0] + 1) % 50
    for layers, changed in ((1, 4), (2, 20)):
        model = Decoder(50, layers=layers, near=3).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        with torch.no_grad():
            differs = (model(tokens) != model(changed_tokens)).any(-1)[0]
        assert differs[:changed].all()
        assert not differs[changed:].any()
