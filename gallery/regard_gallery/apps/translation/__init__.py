"""English to French: an encoder-decoder for short sentences, with cached beam search.

Data: sentence pairs of Tatoeba (tatoeba.org, CC-BY 2.0 FR, each line names its authors), from the
source package of `nmt` on PyPI. English sentences have at most eight words. The English sentences
of the test and validation sets are held out with all their translations. No training pair contains
a held-out English or French sentence, not even with other case or punctuation.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from io import TextIOWrapper
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models._tokenizers import by_word, trained
from .._frame.application import Application, Recipe, Scores, shuffled
from .._frame.data import FOLDER, bounded, first_of
from .._frame.pictures import figure, save
from .baseline import lexicon, word_by_word
from .beam import Written
from .model import END, START, Sentences, Translator, sentences

PLACES = (FOLDER / "nmt/data/fra-eng.zip",)
WORDS = 8  # maximal number of words of an English sentence
TESTED, VALIDATED = 2000, 500
VOCABULARY, READ = 3000, 40_000  # vocabulary size; number of pairs on which the tokenizer is trained
BATCH, SMOOTHING = 128, 0.1
BEAMS, PENALTY = 4, 1.0
LEXICON = "word by word (IBM model 1)"

Pair = tuple[str, str]


class Held(NamedTuple):
    """A held-out English sentence and all its French translations."""

    source: str
    references: list[str]


class Batch(NamedTuple):
    source: Sentences
    target: Sentences  # begins with START
    following: Tensor  # (total,): the token after each token of `target`, without padding


def tatoeba(lines: int | None = None) -> list[Pair]:
    """Returns the distinct pairs (English, French) in the first `lines` lines of the file.

    Leaves out English sentences of more than eight words. The file is sorted by length, so the
    first lines have the shortest sentences. None means all lines.
    """
    path = first_of(PLACES, "Tatoeba English-French")
    try:
        with ZipFile(bounded(path)) as archive, archive.open("fra.txt") as file:
            columns = (line.split("\t") for line in islice(TextIOWrapper(file, "utf-8"), lines))
            pairs = dict.fromkeys((clean(english), clean(french)) for english, french, *_ in columns)
    except (BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{path}: expected fra.txt with pairs: {error}; `make data` brings it") from None
    return [pair for pair in pairs if len(pair[0].split()) <= WORDS]


def clean(text: str) -> str:
    """Normalises Unicode, apostrophes and spaces. The French text has three kinds of space."""
    return " ".join(unicodedata.normalize("NFKC", text).replace("\u2019", "'").split())


def bare(text: str) -> str:
    """Returns the letters and digits of a text in lower case.

    Texts with the same letters and digits count as the same sentence.
    """
    return re.sub(r"\W+", "", text.casefold())


def hold_out(pairs: list[Pair], count: int, seed: int) -> tuple[list[Held], list[Pair]]:
    """Returns `count` held-out English sentences with their translations, and the training pairs.

    The training pairs are those that contain no held-out English or French sentence.
    """
    french: dict[str, list[str]] = defaultdict(list)
    for source, target in pairs:
        french[source].append(target)
    by_text: dict[str, Held] = {}
    english = list(french)
    order = shuffled(len(english), seed).tolist()
    for source in (english[i] for i in order):
        if len(by_text) < count:
            by_text.setdefault(bare(source), Held(source, french[source]))
    held = list(by_text.values())
    excluded = {bare(text) for one in held for text in (one.source, *one.references)}
    return held, [pair for pair in pairs if excluded.isdisjoint(map(bare, pair))]


class App(Application):
    name = "translation"
    more = ("BLEU", "chrF")
    request = "an English sentence in quotes"
    full = Recipe(steps=800, rate=4e-3, warmup=100, every=200)

    def load(self) -> None:
        tested, validated, lines = (12, 8, 3000) if self.quick else (TESTED, VALIDATED, None)
        held, self.trained = hold_out(tatoeba(lines), tested + validated, self.seed)
        self.tested, self.validated = held[:tested], held[tested:]
        read = shuffled(len(self.trained), self.seed)[:READ].tolist()
        texts = [text for i in read for text in self.trained[i]]
        self.tokenizer: Any = trained(texts, VOCABULARY, control=["<start>", "<end>"])

    def model(self) -> nn.Module:
        return Translator(self.tokenizer.get_vocab_size())

    def batch(self, model: nn.Module, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(self.trained), (8 if self.quick else BATCH,), generator=generator)
        return self._batch([self.trained[i] for i in chosen.tolist()])

    def _batch(self, pairs: list[Pair]) -> Batch:
        source, target = (self._tokens(list(side)) for side in zip(*pairs, strict=True))
        following = torch.tensor([token for tokens in target for token in (*tokens, END)])
        return Batch(self._source(source), sentences([[START, *tokens] for tokens in target]), following)

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]

    @staticmethod
    def _source(texts: list[list[int]]) -> Sentences:
        return sentences([[*tokens, END] for tokens in texts])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch.source, batch.target)
        return F.cross_entropy(scores, batch.following, label_smoothing=SMOOTHING * model.training)

    def validation(self, model: nn.Module) -> float:
        """Returns the mean log-probability of the target tokens of the validation sentences."""
        pairs = [(one.source, reference) for one in self.validated for reference in one.references]
        return -float(self.loss(model, self._batch(pairs)))

    def measure(self, model: nn.Module, held: list[Held]) -> Scores:
        translations = self.translate(model, [one.source for one in held])
        return quality([self.text(written.tokens) for written in translations], held)

    def translate(self, model: nn.Module, texts: list[str]) -> list[Written]:
        """Translates English texts to French.

        Sentences of similar length share a batch, which reduces padding.
        """
        tokens = self._tokens([clean(text) for text in texts])
        order = sorted(range(len(texts)), key=lambda i: len(tokens[i]))
        by_index: dict[int, Written] = {}
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            longest = 2 * len(tokens[chosen[-1]]) + 8
            source = self._source([tokens[i] for i in chosen])
            written = model.translate(source, width=BEAMS, longest=longest, penalty=PENALTY)  # type: ignore[operator]
            by_index |= zip(chosen, written, strict=True)
        return [by_index[i] for i in range(len(texts))]

    def text(self, tokens: list[int]) -> str:
        decoded: str = self.tokenizer.decode(tokens)
        return decoded.strip()

    def baselines(self) -> dict[str, Scores]:
        known = lexicon(self.trained)
        return {LEXICON: quality([word_by_word(known, one.source) for one in self.tested], self.tested)}

    def answer(self, model: nn.Module, request: str) -> str:
        (written,) = self.translate(model, [request])
        about = f"log-probability {written.score:.2f}, {len(written.tokens) + 1} tokens with the end"
        return f"{self.text(written.tokens)}\n({about})"

    def draw(self, model: nn.Module, path: Path) -> None:
        """Draws the cross-attention from French to English words, for two test sentences."""
        shown = sorted((one.source for one in self.tested[:50]), key=lambda text: -len(text.split()))[:2]
        picture, axes = figure(10, 4.6, ncols=2)
        for axis, source, written in zip(axes, shown, self.translate(model, shown), strict=True):
            weights, english, french = self.alignment(model, source, written.tokens)
            axis.imshow(weights.numpy(), cmap="magma", vmin=0, aspect="auto")
            axis.set_xticks(range(len(english)), english, rotation=45, ha="right")
            axis.set_yticks(range(len(french)), french)
            axis.set(xlabel="read", ylabel="written")
        save(picture, path)

    def alignment(
        self, model: nn.Module, source: str, target: list[int]
    ) -> tuple[Tensor, list[str], list[str]]:
        """Returns cross-attention weights, the list of English words and the list of French words.

        The weights have a row per French word and a column per English word. They are averaged over
        all heads of all layers.
        """
        from regard.see import capture

        (read,) = self._tokens([source])
        with capture(model, keep="qk") as captured:
            model.states(self._source([read]), sentences([[START, *target]]))  # type: ignore[operator]
        layers = [layer.rows(list(range(len(target) + 1))) for layer in captured if "cross" in layer.name]
        weights = torch.cat(layers, 1)[0].mean(0)  # (target, source); the query of row i predicts target[i]
        english, french = ([*by_word(self.tokenizer, tokens), [END]] for tokens in (read, target))
        by_source = torch.stack([word.sum(1) for word in weights.split([*map(len, english)], 1)], 1)
        by_both = torch.stack([word.mean(0) for word in by_source.split([*map(len, french)])])
        return by_both, self._labels(english), self._labels(french)

    def _labels(self, groups: list[list[int]]) -> list[str]:
        return [*map(self.text, groups[:-1]), "(end)"]


def quality(found: list[str], held: list[Held]) -> Scores:
    """Returns BLEU and chrF of the translations `found`. References are all known translations."""
    from sacrebleu import corpus_bleu, corpus_chrf

    references = list(zip_longest(*(one.references for one in held)))
    return {"BLEU": corpus_bleu(found, references).score, "chrF": corpus_chrf(found, references).score}
