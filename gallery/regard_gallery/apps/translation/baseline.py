"""A lexicon from pairs of sentences by IBM model 1 (Brown et al., 1993), and translation word by word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
NOTHING = ""  # stands in every source sentence, for words that none of its own gives
WORD = re.compile(r"\w+'|\w+|[^\w\s]")  # "l'homme" is two words

Pairs = Sequence[tuple[str, str]]
Integers = NDArray[np.int64]


def lexicon(pairs: Pairs, rounds: int = ROUNDS) -> dict[str, str]:
    """For each word of the sources the target word that it most likely becomes."""
    sources, targets, numbers = _numbered(pairs)
    links, token, tokens = _links(numbers)
    together = links[:, 0] * len(targets) + links[:, 1]
    known, which = np.unique(together, return_inverse=True)
    owner = known // len(targets)
    chance = np.ones(len(known))  # of a target word, given the source word
    for _ in range(rounds):
        weight = chance[which]
        weight /= np.bincount(token, weight, tokens)[token]  # shared by the source words of its sentence
        expected = np.bincount(which, weight, len(known))
        chance = expected / np.bincount(owner, expected, len(sources))[owner]
    best = np.lexsort((-chance, owner))
    first = np.unique(owner[best], return_index=True)[1]
    found = {sources[owner[i]]: targets[known[i] % len(targets)] for i in best[first]}
    written = _written(target for _, target in pairs)
    return {source: written.get(word, word) for source, word in found.items() if source != NOTHING}


def _written(texts: Iterable[str]) -> dict[str, str]:
    """How words are mostly written inside of sentences: names have a capital."""
    forms: dict[str, Counter[str]] = {}
    for text in texts:
        for form in WORD.findall(text)[1:]:
            forms.setdefault(form.lower(), Counter())[form] += 1
    return {word: counted.most_common(1)[0][0] for word, counted in forms.items()}


def _numbered(pairs: Pairs) -> tuple[list[str], list[str], list[tuple[list[int], list[int]]]]:
    """The words of each side, and the pairs in numbers of words."""
    sides: tuple[dict[str, int], dict[str, int]] = ({NOTHING: 0}, {})
    sources = [[0, *_numbers(words(source), sides[0])] for source, _ in pairs]
    targets = [_numbers(words(target), sides[1]) for _, target in pairs]
    return list(sides[0]), list(sides[1]), list(zip(sources, targets, strict=True))


def _numbers(found: list[str], known: dict[str, int]) -> list[int]:
    return [known.setdefault(word, len(known)) for word in found]


def _links(numbers: list[tuple[list[int], list[int]]]) -> tuple[Integers, Integers, int]:
    """Each word of a target with each of its source, (n, 2); the running number of the former; how many."""
    links, token, tokens = [], [], 0
    for source, target in numbers:
        a, b = np.meshgrid(source, target)  # (target, source)
        links.append(np.stack([a.ravel(), b.ravel()], 1))
        token.append(np.repeat(np.arange(tokens, tokens + len(target)), len(source)))
        tokens += len(target)
    return np.concatenate(links), np.concatenate(token), tokens


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def word_by_word(known: dict[str, str], text: str) -> str:
    """Each word for itself, in the order of the source; words that are not known stay as they are."""
    joined = " ".join(known.get(word, word) for word in words(text))
    spaced = re.sub(r" ([.,])", r"\1", joined).replace("' ", "'")
    return spaced[:1].upper() + spaced[1:]
