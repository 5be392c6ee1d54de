"""Claim: BERT, GPT and T5 are models for machine translation. `regard claims bert_translation`

A translator writes a text whose length and order differ from those of its source, one token after
the other. BERT is an encoder: each token attends to all others. A new token then changes the states
of all earlier tokens, so that no cache is possible, and in training each token would see the next
one, which it has to predict. GPT (a decoder) and T5 (an encoder and a decoder) attend causally in
the text that they write.

The experiment trains small models of the three kinds on an artificial language: each source word
becomes one or two words, in reverse order. BERT is trained twice, to predict the next token, and to
fill masked tokens as in its paper. The second one translates in two ways: it fills a mask that is
appended to the text, or it fills a text of masks from left to right, whose length must be known.

A kind of model writes token by token if an appended token leaves earlier logits unchanged and 90 %
of the new sentences are written without error. It does not if earlier logits change and less than
half of the sentences are right. The filling of a given number of masks does not count, because a
translator has to find the length. The experiment takes about 15 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.masks import Causal
from regard.nn import DecoderBlock, EncoderBlock, EncoderDecoder, Stack
from regard.positions import Rotary

from .finding import Finding
from .formula import relative
from .training import trained

START, END, MASK, SOURCE = 0, 1, 2, 3  # tokens; SOURCE is the first word of the source language
WORDS, LENGTH = 8, 4  # words of the source language, words of a sentence
TARGET = SOURCE + WORDS  # first word of the target language
KINDS = TARGET + 2 * WORDS
LONGEST = 2 * LENGTH + 1  # tokens of a translation with at least one END
WIDTH, HEADS, LAYERS = 64, 4, 2
TRANSLATES, FAILS = 0.9, 0.5


def translated(source: Tensor) -> Tensor:
    """Translates sentences (B, LENGTH) to (B, LONGEST), filled up with END.

    Words with an odd number become two words.
    """
    rows = [
        [word for s in reversed(row) for word in ((s + WORDS, s + 2 * WORDS) if s % 2 else (s + WORDS,))]
        for row in source.tolist()
    ]
    return torch.tensor([row + [END] * (LONGEST - len(row)) for row in rows])


def sentences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    source = torch.randint(SOURCE, TARGET, (count, LENGTH), generator=generator)
    return source, translated(source)


class OneStack(nn.Module):
    """One stack over source and text: BERT, or with a causal mask GPT.

    Maps source (B, Ls) and text (B, Lt) to logits (B, Lt, KINDS).
    """

    def __init__(self, causal: bool) -> None:
        super().__init__()
        mask, position = Causal() if causal else None, Rotary(WIDTH // HEADS)
        self.token = nn.Embedding(KINDS, WIDTH)
        blocks = [EncoderBlock(WIDTH, HEADS, position=position, mask=mask) for _ in range(LAYERS)]
        self.stack, self.score = Stack(blocks, nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, KINDS)

    def forward(self, source: Tensor, text: Tensor) -> Tensor:
        states = self.stack(self.token(torch.cat((source, text), 1)))
        scores: Tensor = self.score(states[:, source.shape[1] :])
        return scores


class TwoStacks(nn.Module):
    """T5: an encoder for the source, and a decoder for the text."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"position": Rotary(WIDTH // HEADS)}
        encoder = [EncoderBlock(WIDTH, HEADS, **options) for _ in range(LAYERS)]
        decoder = [DecoderBlock(WIDTH, HEADS, kv_model=WIDTH, **options) for _ in range(LAYERS)]
        stacks = (Stack(blocks, nn.LayerNorm(WIDTH)) for blocks in (encoder, decoder))
        self.token, self.score = nn.Embedding(KINDS, WIDTH), nn.Linear(WIDTH, KINDS)
        self.stacks = EncoderDecoder(*stacks)

    def forward(self, source: Tensor, text: Tensor) -> Tensor:
        scores: Tensor = self.score(self.stacks(self.token(source), self.token(text)))
        return scores


def next_loss(model: nn.Module, source: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    begun = F.pad(target[:, :-1], (1, 0), value=START)
    return F.cross_entropy(model(source, begun).flatten(0, 1), target.flatten())


def mask_loss(model: nn.Module, source: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the loss at masked tokens. Each text has its own share of them, from 15 to 100 %."""
    share = torch.rand(len(target), 1, generator=generator).clamp(min=0.15)
    hidden = torch.rand(target.shape, generator=generator) < share
    scores = model(source, target.masked_fill(hidden, MASK))
    return F.cross_entropy(scores[hidden], target[hidden])


Loss = Callable[[nn.Module, Tensor, Tensor, torch.Generator], Tensor]
Write = Callable[[nn.Module, Tensor], Tensor]


def write_next(model: nn.Module, source: Tensor) -> Tensor:
    text = source.new_full((len(source), 1), START)
    for _ in range(LONGEST):
        text = torch.cat((text, model(source, text)[:, -1:].argmax(-1)), 1)
    return text[:, 1:]


def append_masks(model: nn.Module, source: Tensor) -> Tensor:
    text = source.new_empty(len(source), 0)
    for _ in range(LONGEST):
        scores = model(source, F.pad(text, (0, 1), value=MASK))
        text = torch.cat((text, scores[:, -1:].argmax(-1)), 1)
    return text


def fill_masks(model: nn.Module, source: Tensor) -> Tensor:
    text = source.new_full((len(source), LONGEST), MASK)
    for i in range(LONGEST):
        text[:, i] = model(source, text)[:, i].argmax(-1)
    return text


def correct(text: Tensor, target: Tensor) -> float:
    """Returns the share of texts that equal the target up to the first END."""
    ended = text.masked_fill((text == END).cumsum(1) > 0, END)
    return float((ended == target).all(1).float().mean())


def change(model: nn.Module, source: Tensor, target: Tensor) -> float:
    """Returns by how much an appended token changes earlier logits, relative to their norm."""
    before, after = model(source, target[:, :-1]), model(source, target)[:, :-1]
    return relative(after, before)


def tested(
    make: Callable[[], nn.Module], loss_of: Loss, ways: Mapping[str, Write], steps: int
) -> dict[str, Any]:
    """Trains a model. Returns its loss, its change by an appended token, and the results of its ways."""
    torch.manual_seed(0)
    generator, model = torch.Generator().manual_seed(0), make()
    losses = trained(model, lambda: loss_of(model, *sentences(32, generator), generator), steps, 3e-3)
    with torch.no_grad():
        source, target = sentences(256, torch.Generator().manual_seed(1))
        shares = {name: correct(write(model, source), target) for name, write in ways.items()}
        return {
            "loss": mean(losses[-20:]),
            "change by a new token": change(model, source, target),
            "right": shares,
        }


WAYS: dict[str, Write] = {"append masks": append_masks, "fill masks": fill_masks}
NEXT: dict[str, Write] = {"next token": write_next}


def writes(moved: float, share: float) -> bool | None:
    """Returns whether a model writes token by token, or None if that is not decided.

    `moved` is its change by a new token, `share` its share of right sentences.
    """
    if moved < 1e-5 and share >= TRANSLATES:
        return True
    return False if moved > 1e-3 and share < FAILS else None


def judge(able: Sequence[bool | None]) -> str:
    """Returns the verdict from the kinds of models that write token by token."""
    if None in able:
        return "undecided"
    return "right" if all(able) else "incomplete" if any(able) else "wrong"


def measure(steps: int = 300) -> Finding:
    bert, masked, gpt, t5 = (
        tested(lambda: OneStack(False), next_loss, NEXT, steps),
        tested(lambda: OneStack(False), mask_loss, WAYS, steps),
        tested(lambda: OneStack(True), next_loss, NEXT, steps),
        tested(TwoStacks, next_loss, NEXT, steps),
    )
    ways = {**bert["right"], **masked["right"]}
    able = {
        "BERT": writes(bert["change by a new token"], max(ways["next token"], ways["append masks"])),
        "GPT": writes(gpt["change by a new token"], gpt["right"]["next token"]),
        "T5": writes(t5["change by a new token"], t5["right"]["next token"]),
    }
    return Finding(
        claim="BERT, GPT and T5 are models for machine translation",
        verdict=judge([*able.values()]),
        measured=f"a new token changes the logits of earlier tokens by {bert['change by a new token']:.0%} "
        f"in BERT, {gpt['change by a new token']:.1g} in GPT, {t5['change by a new token']:.1g} in T5; right "
        f"translations: BERT {ways['next token']:.0%} (next token, despite a training loss of "
        f"{bert['loss']:.2g}), {ways['append masks']:.0%} (appended masks), {ways['fill masks']:.0%} (masks "
        f"filled in a text of known length), GPT {gpt['right']['next token']:.0%}, "
        f"T5 {t5['right']['next token']:.0%}",
        correct="GPT and T5 write a text token by token; BERT is an encoder, which sees the tokens that it "
        "has to predict: it fills masks in a text of known length, and can be the encoder of a translator",
        numbers={
            "BERT, next token": bert,
            "BERT, masked tokens": masked,
            "GPT": gpt,
            "T5": t5,
            "writes token by token": able,
        },
    )
