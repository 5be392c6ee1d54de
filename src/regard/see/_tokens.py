"""Tokens: as they are compared, and as people read them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._tools.arguments import describe

MOST_LETTERS = 18
# Byte-level BPE and SentencePiece write the space before a word so.
SPACES = {"Ġ": "·", "▁": "·", "Ċ": "⏎", " ": "·", "\n": "⏎"}

Texts = Sequence[str] | Sequence[Sequence[str]]


def samples(tokens: Texts | None) -> tuple[tuple[str, ...], ...] | None:
    """The tokens of each sample. A list of strings is one sample."""
    if tokens is None:
        return None
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not tokens:
        raise TypeError(f"tokens: expected a list of strings, or one for each sample, got {describe(tokens)}")
    each = (tokens,) if isinstance(tokens[0], str) else tokens
    for sample in each:
        wrong = [token for token in sample if not isinstance(token, str)]
        if isinstance(sample, str) or wrong or not sample:
            raise TypeError(
                f"tokens: expected strings, at least one in a sample, got {describe(wrong or sample)}"
            )
    return tuple(tuple(map(str, sample)) for sample in each)


def of_ids(tokenizer: Any, ids: Tensor, real: Tensor | None) -> tuple[tuple[str, ...], ...]:
    """The tokens of ids (B, L), without the padding at the end that `real` (B, L), 1 or 0, says."""
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
    """Equal tokens have equal numbers."""
    number: dict[str, int] = {}
    return [number.setdefault(token, len(number)) for token in sample]


def is_delimiter(token: str) -> bool:
    """Special tokens such as [SEP] and <s>, and punctuation."""
    bare = token.strip("".join(SPACES))
    if len(bare) > 2 and (bare[0], bare[-1]) in (("[", "]"), ("<", ">")):
        return True
    return bool(bare) and all(unicodedata.category(letter)[0] == "P" for letter in bare)


def label(token: str, most: int = MOST_LETTERS) -> str:
    """Short, visible, on one line."""
    shown = "".join(SPACES.get(letter, letter) for letter in token)
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in shown
    )
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def find(tokens: Sequence[str], token: int | str) -> int:
    """The position of a token that is given as one, or by its text, which must be there once."""
    if isinstance(token, int):
        if not -len(tokens) <= token < len(tokens):
            raise IndexError(f"token: expected a position below {len(tokens)}, got {token}")
        return token % len(tokens)
    bare = "".join(SPACES)
    found = [i for i, text in enumerate(tokens) if token in (text, text.strip(bare))]
    if len(found) != 1:
        where = f"at {found}; give the position" if found else f"not among {list(tokens)[:20]}"
        raise ValueError(f"token: expected a token that is there once, got {token!r}, {where}")
    return found[0]
