"""Tokens as text: comparison, search, and labels."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._tools.arguments import describe

MOST_LETTERS = 18
# Symbol for a space or newline in byte-level BPE or SentencePiece -> symbol in labels.
SPACES = {"Ġ": "·", "▁": "·", "Ċ": "⏎", " ": "·", "\n": "⏎"}

JOINERS = "\u200c\u200d"  # in emoji and in words of several scripts

Texts = Sequence[str] | Sequence[Sequence[str]]


def samples(tokens: Texts | None, name: str = "tokens") -> tuple[tuple[str, ...], ...] | None:
    """Returns the argument `tokens` as one tuple per sample. A list of strings is one sample."""
    if tokens is None:
        return None
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not tokens:
        hint = "; write tokenizer.convert_ids_to_tokens(ids[0])" if isinstance(tokens, Tensor) else ""
        raise TypeError(
            f"{name}: expected a list of strings, or one for each sample, got {describe(tokens)}{hint}"
        )
    batch = (tokens,) if isinstance(tokens[0], str) else tokens
    for sample in batch:
        wrong = [token for token in sample if not isinstance(token, str)]
        if isinstance(sample, str) or wrong or not sample:
            raise TypeError(
                f"{name}: expected strings, at least one in a sample, got {describe(wrong or sample)}"
            )
    return tuple(tuple(map(str, sample)) for sample in batch)


def of_ids(tokenizer: Any, ids: Tensor, real: Tensor | None) -> tuple[tuple[str, ...], ...]:
    """Returns the tokens of ids (B, L), one tuple per sample.

    `real` (B, L) is 0 for padding. Padding at the end of a sample is left out.
    """
    ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
    lengths = [ids.shape[1]] * len(ids)
    if real is not None and real.shape == ids.shape:
        ends = real.bool().long() * torch.arange(1, ids.shape[1] + 1, device=real.device)
        lengths = ends.amax(1).clamp_min(1).tolist()
    return tuple(
        tuple(map(str, tokenizer.convert_ids_to_tokens(row[:length].tolist())))
        for row, length in zip(ids, lengths, strict=True)
    )


def numbers(sample: Sequence[str]) -> list[int]:
    """Returns one integer per token. Equal tokens have equal integers."""
    number: dict[str, int] = {}
    return [number.setdefault(token, len(number)) for token in sample]


def is_delimiter(token: str) -> bool:
    """Returns whether a token is punctuation or a special token such as [SEP] or <s>."""
    bare = token.strip("".join(SPACES))
    if len(bare) > 2 and (bare[0], bare[-1]) in (("[", "]"), ("<", ">")):
        return True
    return bool(bare) and all(unicodedata.category(letter)[0] == "P" for letter in bare)


def delimiters(sample: Sequence[str]) -> list[int]:
    """Returns the positions of the first token and of all delimiters."""
    return [i for i, token in enumerate(sample) if i == 0 or is_delimiter(token)]


def label(token: str, most: int = MOST_LETTERS) -> str:
    """Returns a one-line label of a token, with visible spaces and at most `most` characters."""
    joiners = JOINERS if len(token) > 1 else ""
    letters = (SPACES.get(letter, letter) for letter in token)
    shown = "".join(escaped(letter, lambda x: x.isprintable() or x in joiners) for letter in letters)
    return shortened(shown, most)


def shortened(text: str, most: int = MOST_LETTERS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def escaped(letter: str, fits: Callable[[str], bool]) -> str:
    """Returns a character, or its Unicode escape if `fits(letter)` is False."""
    return letter if fits(letter) else letter.encode("unicode_escape").decode()


def index(name: str, value: int, size: int, what: str = "an index ") -> int:
    """Returns an index as a number from 0 to size - 1. Negative indices count from the end.

    Raises IndexError if the index is out of range.
    """
    if not -size <= value < size:
        raise IndexError(f"{name}: expected {what}below {size}, got {value}")
    return value % size


def find(tokens: Sequence[str], token: int | str) -> int:
    """Returns the index of a token. `token` is its index, or a text that occurs once."""
    if isinstance(token, int):
        return index("token", token, len(tokens), "a position ")
    bare = "".join(SPACES)
    matches = [i for i, text in enumerate(tokens) if token in (text, text.strip(bare))]
    if len(matches) != 1:
        problem = f"at {matches}; pass the position" if matches else f"not among {list(tokens)[:20]}"
        raise ValueError(f"token: expected a token that occurs once, got {token!r}, {problem}")
    return matches[0]
