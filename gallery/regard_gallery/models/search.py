"""Semantic search: splits texts into passages and ranks them by their similarity to a question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from .minilm import Embedder


class Passage(NamedTuple):
    """Consecutive lines of a text."""

    source: str
    line: int  # number of the first line, from 1
    text: str


class Hit(NamedTuple):
    passage: Passage
    score: float  # cosine similarity of question and passage


def passages(embedder: Embedder, source: str, text: str, size: int = 128) -> list[Passage]:
    """Splits a text into passages of whole lines, with at most `size` tokens each.

    A blank line ends a passage that has at least `size` / 2 tokens. A line of more than `size`
    tokens is split.
    """
    room = embedder.limit - embedder.tokenizer.num_special_tokens_to_add()
    if not 1 <= size <= room:
        raise ValueError(f"size: expected from 1 to {room} tokens, which the model reads, got {size}")
    packed: list[Passage] = []
    filled = 0  # number of tokens in the last passage
    for line, count in _short_lines(embedder, source, text, size):
        if not line.text.strip():
            filled = size if 2 * filled >= size else filled
        elif packed and filled + count <= size:
            packed[-1] = packed[-1]._replace(text=f"{packed[-1].text}\n{line.text}")
            filled += count
        else:
            packed.append(line)
            filled = count
    return packed


def _short_lines(embedder: Embedder, source: str, text: str, size: int) -> Iterator[tuple[Passage, int]]:
    """Yields each line as a Passage, with its number of tokens.

    A line of more than `size` tokens is split into several passages.
    """
    lines = text.splitlines()
    if not lines:
        return
    encoded = embedder.tokenizer(lines, add_special_tokens=False, return_offsets_mapping=True)
    for number, (line, tokens) in enumerate(zip(lines, encoded["offset_mapping"], strict=True), 1):
        for first in range(0, max(len(tokens), 1), size):
            part = tokens[first : first + size]
            shown = line[part[0][0] : part[-1][1]] if len(tokens) > size else line
            yield Passage(source, number, shown), len(part)


def rank(question: Tensor, vectors: Tensor, found: Sequence[Passage], top: int) -> list[Hit]:
    """Returns the `top` passages that are most similar to a question, best first.

    `question` (D,) is the embedding of the question. `vectors` (len(found), D) are the embeddings
    of the passages `found`.
    """
    if top < 1:
        raise ValueError(f"top: expected at least 1, got {top}")
    best = (vectors @ question).topk(min(top, len(found)))
    scores = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [Hit(found[i], score) for score, i in scores]
