"""Text generation with a cache that is reused between prompts."""

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
    """A causal language model of Transformers and its tokenizer."""

    model: Any
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Tokenizes a text, with the model's special tokens."""
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        return tokens

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokenizes a conversation up to the model's turn, with the model's chat template."""
        if not self.tokenizer.chat_template:
            raise ValueError("model: expected a tokenizer with a chat template, which this one lacks")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    @property
    def context(self) -> int:
        """The maximum length of the model's context in tokens, or sys.maxsize without a limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    @property
    def stops(self) -> set[int]:
        """The tokens at which generation stops."""
        ends = self.model.generation_config.eos_token_id
        listed = ends if isinstance(ends, list) else [ends]
        return {end for end in [*listed, self.tokenizer.eos_token_id] if end is not None}


@dataclass(frozen=True)
class Sampling:
    """Sampling options. Temperature 0 takes the most probable token."""

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
        """Returns a token, chosen from logits (V,) over the vocabulary."""
        if self.temperature == 0:
            return int(logits.argmax())
        probs, tokens = (logits.double() / self.temperature).softmax(-1).sort(descending=True, stable=True)
        before = probs.cumsum(-1) - probs
        drawn = probs.masked_fill(before >= self.top_p, 0).multinomial(1, generator=generator)
        return int(tokens[drawn])


@dataclass
class Report:
    """Token counts, times and cache size of a generation."""

    read: int = 0  # prompt tokens that were not in the cache
    reading: float = 0.0  # seconds of prefill
    written: int = 0  # generated tokens
    writing: float = 0.0  # seconds of decoding, after the prefill
    cache_bytes: int = 0

    @property
    def speed(self) -> float:
        """Generated tokens per second of decoding. The first token is part of the prefill."""
        return (self.written - 1) / self.writing if self.writing else 0.0


class Session:
    """A model and a cache that is kept between prompts.

    If a new prompt begins with cached tokens, these tokens are not computed again.
    """

    def __init__(self, language: LanguageModel, new_cache: Callable[[], Any]) -> None:
        self.language, self.new_cache = language, new_cache
        self.report = Report()
        self._forget()

    def _forget(self) -> None:
        self.cache: Any = self.new_cache()
        self.tokens: list[int] = []
        # False if a call of the model was interrupted, so that the caches of only some layers grew.
        self.whole = True

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Yields the tokens that the model generates after `prompt`.

        Ends before a stop token, after `sampling.max_tokens` tokens, or when the context is full.
        """
        limit, got = self.language.context, len(prompt)
        if not 1 <= got <= limit:
            raise ValueError(f"prompt: expected from 1 to {limit} tokens, which the model reads, got {got}")
        return self._generate(prompt, sampling)

    def _generate(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
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
        """Crops the cache to the prefix that its tokens share with `prompt`.

        The prefix excludes the last token of `prompt`, which must be computed to get logits.
        """
        if not self.whole:
            self._forget()
        common = 0
        while common < min(len(self.tokens), len(prompt) - 1) and self.tokens[common] == prompt[common]:
            common += 1
        if common == len(self.tokens):
            return
        try:
            self.cache.crop(common - len(self.tokens))
            del self.tokens[common:]
        except (NotImplementedError, ValueError, RuntimeError):  # a sliding cache no longer has the prefix
            self._forget()

    @torch.inference_mode()
    def _read(self, tokens: Sequence[int]) -> Tensor:
        """Appends tokens to the cache and returns next-token logits (vocabulary,)."""
        ids = torch.tensor([list(tokens)])
        self.whole = False
        out = self.language.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.whole = True
        self.tokens.extend(tokens)
        self.report.cache_bytes = cache_bytes(self.cache)
        return out.logits[0, -1]  # type: ignore[no-any-return]


def cache_bytes(cache: Any) -> int:
    """Returns the bytes of the keys and values in a cache of Regard or Transformers."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)


def pieces(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Yields the text of the tokens in pieces, as tokens arrive.

    A piece ends with a complete character. Only the last piece may end with an incomplete one.
    """
    # DecodeStream of `tokenizers` is not used: it drops an incomplete character at the end of the text.
    seen: list[int] = []
    start = shown = 0  # tokens [0, shown) were yielded; decoding starts at `start` to have context
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
    """A conversation of a user with a model. The model's chat template turns it into a prompt."""

    session: Session
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, sampling: Sampling) -> Iterator[str]:
        """Yields the model's answer to `text` in pieces, as they are generated.

        If the answer is interrupted, `messages` contains the pieces so far. If the model raises
        before the first piece, `messages` does not change.
        """
        tokenizer = self.session.language.tokenizer
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.session.language.encode_chat(asked)
        answer = {"role": "assistant", "content": ""}
        for piece in pieces(tokenizer, self.session.generate(prompt, sampling)):
            answer["content"] += piece
            self.messages = [*asked, answer]
            yield piece
        self.messages = [*asked, answer]  # needed for an empty answer, which yields no piece
