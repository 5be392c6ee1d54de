"""The base class of the applications that train a language model: documents, tokens, bits per byte,
n-gram baselines and generation.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models._tokenizers import trained as trained_tokenizer
from ...models.generate import Sampling
from .._frame.application import Application, Recipe, Scores, shuffled
from .._frame.pictures import BLUE, GREY, figure, save
from .decoder import Decoder, write
from .ngram import NGrams

END = "<end>"  # token 0, which marks the end of a document
BYTES = 257  # vocabulary size of the byte n-grams: all bytes, and END
ORDER = 5
VALIDATED = 30_000  # only this number of characters of a validation document is used
AT_ONCE = 8  # sequences per evaluation batch
DRAWN = 400  # number of test sequences that the picture averages


class LanguageApp(Application):
    """Trains a decoder on documents. Baselines are n-grams of bytes and of the decoder's tokens."""

    less = ("bits per byte",)
    vocabulary: ClassVar[int]
    length: ClassVar[int]  # tokens per sequence
    sequences: ClassVar[int]  # sequences per batch
    held_out: ClassVar[tuple[int, int]]  # numbers of test and validation documents
    near: ClassVar[int | None] = None  # the argument `near` of the decoder
    full = Recipe(4000, rate=4e-3, decay=0.1, warmup=200, every=500)
    sampling: ClassVar[Sampling]

    @staticmethod
    @abstractmethod
    def documents() -> list[str]: ...

    def load(self) -> None:
        texts = self.documents()
        order = shuffled(len(texts), self.seed).tolist()
        cut = 20_000 if self.quick else None
        texts = [texts[i][:cut] for i in (order[:10] if self.quick else order)]
        tested, validated = (2, 1) if self.quick else self.held_out
        self.tested = texts[:tested]
        self.validated = [text[:VALIDATED] for text in texts[tested : tested + validated]]
        self.trained = texts[tested + validated :]
        size = 300 if self.quick else self.vocabulary
        self.tokenizer = trained_tokenizer(self.trained, size, control=[END], first_space=False)
        self.size: int = self.tokenizer.get_vocab_size()
        self.tokens = self.encode(self.trained)

    def encode(self, texts: list[str]) -> Tensor:
        """Returns the tokens of all texts, (n,), with end tokens before the first and after each."""
        documents = [[0], *([*encoding.ids, 0] for encoding in self.tokenizer.encode_batch(texts))]
        return torch.tensor([token for tokens in documents for token in tokens])

    def model(self) -> nn.Module:
        return Decoder(self.size, near=self.near)

    def batch(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Draws sequences (B, length + 1) at random positions of the training documents."""
        begins = torch.randint(len(self.tokens) - self.length, (self.sequences,), generator=generator)
        return torch.stack([self.tokens[at : at + self.length + 1] for at in begins.tolist()])

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def measure(self, model: nn.Module, held: list[str]) -> Scores:
        bits = self.bits(model, self.encode(held)).double().sum()
        return {"bits per byte": float(bits) / count_bytes(held)}

    def bits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Returns -log2 of each token's predicted probability, except the first token's: (n - 1,).

        The model runs on sequences of `length` tokens. Each sequence starts in the middle of the
        one before it. Only the predictions in the second half of a sequence are used, except in the
        first sequence, where all are. So every prediction after the first `length` / 2 has a
        context of more than `length` / 2 tokens.
        """
        half = self.length // 2
        padded = F.pad(tokens, (0, -(len(tokens) - 1) % half + half))
        sequences = padded[:-1].unfold(0, self.length, half)  # (n, length)
        following = padded[1:].unfold(0, self.length, half)
        pairs = zip(sequences.split(AT_ONCE), following.split(AT_ONCE), strict=True)
        by_sequence = torch.cat([_bits(model(x), y) for x, y in pairs])
        bits = torch.cat([by_sequence[0, :half], by_sequence[:, half:].flatten()])
        return bits[: len(tokens) - 1]

    def baselines(self) -> dict[str, Scores]:
        tested = self.encode(self.tested).numpy()
        return {
            f"{ORDER}-grams of bytes": self._ngrams(_bytes(self.trained), _bytes(self.tested), BYTES),
            f"{ORDER}-grams of the same tokens": self._ngrams(self.tokens.numpy(), tested, self.size),
        }

    def _ngrams(self, trained: Any, tested: Any, vocabulary: int) -> Scores:
        bits = NGrams(trained, vocabulary, ORDER).bits(tested)[1:]
        return {"bits per byte": float(bits.sum()) / count_bytes(self.tested)}

    def answer(self, model: nn.Module, request: str) -> str:
        prompt = [0, *self.tokenizer.encode(request).ids]
        began = time.perf_counter()
        written: list[int] = []
        for token in write(model, prompt, self.sampling):  # type: ignore[arg-type]
            if token == 0 or self.ended(request, self.tokenizer.decode(written)) is not None:
                break
            written.append(token)
        seconds = time.perf_counter() - began
        text: str = self.tokenizer.decode(written)
        text = request + text[: self.ended(request, text)]
        return f"{text.rstrip()}\n\n({len(written)} tokens, {len(written) / seconds:.0f} a second)"

    def ended(self, request: str, written: str) -> int | None:
        """Returns the index at which the generated text should end, or None to continue."""
        return None

    def draw(self, model: nn.Module, path: Path) -> None:
        """Plots the mean bits per token against the number of context tokens.

        One curve shows the decoder and one the n-grams of tokens. Both are averages over 400 test
        sequences.
        """
        tokens = self.encode(self.tested)
        begins = torch.linspace(0, len(tokens) - self.length - 1, DRAWN).long()
        sequences = tokens[begins[:, None] + torch.arange(self.length + 1)]  # (DRAWN, length + 1)
        batches = sequences.split(AT_ONCE)
        by_model = torch.cat([_bits(model(batch[:, :-1]), batch[:, 1:]) for batch in batches])
        grams = NGrams(self.tokens.numpy(), self.size, ORDER)
        by_grams = torch.from_numpy(np.stack([grams.bits(row)[1:] for row in sequences.numpy()]))
        picture, axes = figure(7.4, 3.8)
        for bits, colour, label in ((by_grams, GREY, f"{ORDER}-grams"), (by_model, BLUE, self.name)):
            positions, means = by_doubling(bits.mean(0))
            axes.plot(positions, means, color=colour, marker="o", markersize=4, label=label)
        axes.set(xscale="log", xlabel="tokens of context", ylabel="bits per held-out token")
        axes.set_xticks(ticks := [2**i for i in range(int(math.log2(self.length)))], map(str, ticks))
        axes.minorticks_off()
        axes.legend(frameon=False)
        save(picture, path)


def _bits(scores: Tensor, following: Tensor) -> Tensor:
    """Returns -log2 of the probabilities of `following` (B, L), from logits (B, L, vocabulary)."""
    return F.cross_entropy(scores.transpose(1, 2), following, reduction="none") / math.log(2)


def count_bytes(texts: list[str]) -> int:
    """Returns the number of UTF-8 bytes of all texts, plus one end token for each text."""
    return sum(len(text.encode()) + 1 for text in texts)


def _bytes(texts: list[str]) -> Any:
    """Returns the bytes of all texts as tokens 1 to 256.

    As in `encode`, the end token (0) is before the first text and after every text.
    """
    tokens = [0]
    for text in texts:
        tokens += [1 + byte for byte in text.encode()] + [0]
    return np.array(tokens)


def by_doubling(values: Tensor) -> tuple[list[float], list[float]]:
    """Averages values[i - 1] over ranges of i: i = 1, i = 2 to 3, i = 4 to 7, and so on.

    Returns, for each range, the geometric mean of its first and last i, and the mean of its values.
    Values after the last complete range are dropped.
    """
    starts = [2**i for i in range(int(math.log2(len(values) + 1)))]
    means = [float(values[a - 1 : 2 * a - 1].mean()) for a in starts]
    return [math.sqrt(a * (2 * a - 1)) for a in starts], means
