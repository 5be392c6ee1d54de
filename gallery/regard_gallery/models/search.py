"""Search by meaning: texts become passages, passages become vectors, and the nearest to a question win."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from .minilm import Embedder


class Passage(NamedTuple):
    """Some lines of a text."""

    source: str
    line: int  # its first line, from 1
    text: str


class Hit(NamedTuple):
    passage: Passage
    score: float  # the cosine of the angle between question and passage


def passages(embedder: Embedder, source: str, text: str, size: int = 128) -> list[Passage]:
    """Lines packed to at most `size` tokens; a blank line ends a passage that is at least half full."""
    room = embedder.limit - embedder.tokenizer.num_special_tokens_to_add()
    if not 1 <= size <= room:
        raise ValueError(f"size: expected from 1 to {room} tokens, which the model reads, got {size}")
    packed: list[Passage] = []
    held = 0  # tokens in the last passage
    for line, count in _short_lines(embedder, source, text, size):
        if not line.text.strip():
            held = size if 2 * held >= size else held
        elif packed and held + count <= size:
            packed[-1] = packed[-1]._replace(text=f"{packed[-1].text}\n{line.text}")
            held += count
        else:
            packed.append(line)
            held = count
    return packed


def _short_lines(embedder: Embedder, source: str, text: str, size: int) -> Iterator[tuple[Passage, int]]:
    """Each line with its number of tokens; a line of more than `size` in parts."""
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
    """The `top` passages nearest to the question (D,), best first; `vectors` are (len(found), D)."""
    if top < 1:
        raise ValueError(f"top: expected at least 1, got {top}")
    best = (vectors @ question).topk(min(top, len(found)))
    scores = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [Hit(found[i], score) for score, i in scores]
