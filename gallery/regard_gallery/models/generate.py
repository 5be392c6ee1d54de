"""Text, token by token: a model reads a prompt into its cache and writes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model of transformers and its tokenizer."""

    model: Any
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model expects around it."""
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        return tokens

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation up to the model's turn, by its own chat template."""
        if not self.tokenizer.chat_template:
            raise ValueError("model: expected a tokenizer with a chat template, which this one lacks")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    @property
    def context(self) -> int:
        """The largest number of tokens that it reads; models without positions have no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    @property
    def stops(self) -> set[int]:
        """Tokens that end a text."""
        ends = self.model.generation_config.eos_token_id
        listed = ends if isinstance(ends, list) else [ends]
        return {end for end in [*listed, self.tokenizer.eos_token_id] if end is not None}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many at most. Temperature 0 takes the likeliest."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a finite number from 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number above 0 and up to 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: expected a number from 0 to 2^63 - 1, got {self.seed}")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token for logits (V,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        chances, tokens = (logits.double() / self.temperature).softmax(-1).sort(descending=True, stable=True)
        before = chances.cumsum(-1) - chances
        drawn = chances.masked_fill(before >= self.top_p, 0).multinomial(1, generator=generator)
        return int(tokens[drawn])


@dataclass
class Report:
    """What reading and writing took."""

    read: int = 0  # tokens
    reading: float = 0.0  # seconds
    written: int = 0
    writing: float = 0.0  # seconds, from the first new token on
    cache_bytes: int = 0

    @property
    def speed(self) -> float:
        """Tokens a second, without the first, which comes with the prompt."""
        return (self.written - 1) / self.writing if self.writing else 0.0


class Session:
    """A model, a cache, and the tokens that the cache holds. Texts that begin alike are read once."""

    def __init__(self, language: LanguageModel, new_cache: Callable[[], Any]) -> None:
        self.language, self.new_cache = language, new_cache
        self.report = Report()
        self._forget()

    def _forget(self) -> None:
        self.cache: Any = self.new_cache()
        self.tokens: list[int] = []
        self.whole = True  # no call was interrupted, which leaves more in some layers than in others

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """New tokens behind `prompt`, until one that ends the text, which is not given."""
        most, got = self.language.context, len(prompt)
        if not 1 <= got <= most:
            raise ValueError(f"prompt: expected from 1 to {most} tokens, which the model reads, got {got}")
        return self._written(prompt, sampling)

    def _written(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
        self._rewind(prompt)
        stops = self.language.stops
        generator = torch.Generator().manual_seed(sampling.seed)
        started = time.perf_counter()
        report = self.report = Report(read=len(prompt) - len(self.tokens))
        logits = self._read(prompt[len(self.tokens) :])
        first = time.perf_counter()
        report.reading = first - started
        for _ in range(sampling.max_tokens):
            token = sampling.choose(logits, generator)
            if token in stops:
                return
            report.written += 1
            yield token
            if report.written == sampling.max_tokens or len(self.tokens) == self.language.context:
                return
            logits = self._read([token])
            report.writing = time.perf_counter() - first

    def _rewind(self, prompt: Sequence[int]) -> None:
        """Keep what the cache shares with `prompt`, but leave at least one token to be read."""
        if not self.whole:
            self._forget()
        same = 0
        while same < min(len(self.tokens), len(prompt) - 1) and self.tokens[same] == prompt[same]:
            same += 1
        if same == len(self.tokens):
            return
        try:
            self.cache.crop(same - len(self.tokens))
            del self.tokens[same:]
        except (NotImplementedError, ValueError, RuntimeError):  # a window has dropped what would be needed
            self._forget()

    @torch.inference_mode()
    def _read(self, tokens: Sequence[int]) -> Tensor:
        """Logits (V,) behind the last of `tokens`."""
        ids = torch.tensor([list(tokens)])
        self.whole = False
        out = self.language.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.whole = True
        self.tokens.extend(tokens)
        self.report.cache_bytes = cache_bytes(self.cache)
        return out.logits[0, -1]  # type: ignore[no-any-return]


def cache_bytes(cache: Any) -> int:
    """The memory of keys and values, in a cache of ours or of transformers."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)


def pieces(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """The text of `tokens` as they come. A character that takes several tokens is given when it is whole."""
    seen: list[int] = []
    start = shown = 0  # tokens from `start` give the context of those from `shown`
    for token in tokens:
        seen.append(token)
        before = tokenizer.decode(seen[start:shown], skip_special_tokens=True)
        text = tokenizer.decode(seen[start:], skip_special_tokens=True)
        if len(text) > len(before) and not text.endswith("\ufffd"):
            yield text[len(before) :]
            start, shown = shown, len(seen)
    before = tokenizer.decode(seen[start:shown], skip_special_tokens=True)
    if rest := tokenizer.decode(seen[start:], skip_special_tokens=True)[len(before) :]:
        yield rest


@dataclass
class Conversation:
    """Turns of a user and a model, by the model's own chat template."""

    session: Session
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, sampling: Sampling) -> Iterator[str]:
        """The answer, piece by piece. A turn that ends early keeps what was said; one that fails, nothing."""
        tokenizer = self.session.language.tokenizer
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.session.language.encode_chat(asked)
        said = {"role": "assistant", "content": ""}
        for piece in pieces(tokenizer, self.session.generate(prompt, sampling)):
            said["content"] += piece
            self.messages = [*asked, said]
            yield piece
        self.messages = [*asked, said]  # also an answer without words
