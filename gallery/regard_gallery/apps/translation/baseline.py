"""Translates word by word, with a lexicon learned by IBM model 1 (Brown et al., 1993)."""

# nltk's IBMModel1 is not used: it is slower, and its tie-breaking gives other scores.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
NOTHING = ""  # IBM model 1's NULL word, which is added to every source sentence
WORD = re.compile(r"\w+'|\w+|[^\w\s]")  # "l'homme" is two words

Pairs = Sequence[tuple[str, str]]
Integers = NDArray[np.int64]


def lexicon(pairs: Pairs, rounds: int = ROUNDS) -> dict[str, str]:
    """Maps each source word to its most probable translation."""
    sources, targets, sentences = _indexed(pairs)
    links, token, tokens = _links(sentences)
    codes, entry = np.unique(links[:, 0] * len(targets) + links[:, 1], return_inverse=True)
    source = codes // len(targets)
    probability = np.ones(len(codes))  # p(target word | source word) of each pair in `codes`
    for _ in range(rounds):
        weight = probability[entry]
        weight /= np.bincount(token, weight, tokens)[token]  # normalises over the links of each target word
        expected = np.bincount(entry, weight, len(codes))
        probability = expected / np.bincount(source, expected, len(sources))[source]
    best = np.lexsort((-probability, source))
    first = np.unique(source[best], return_index=True)[1]
    likely = {sources[source[i]]: targets[codes[i] % len(targets)] for i in best[first]}
    spelling = _spelling(target for _, target in pairs)
    return {word: spelling.get(other, other) for word, other in likely.items() if word != NOTHING}


def _spelling(texts: Iterable[str]) -> dict[str, str]:
    """Maps each lower-case word to its most frequent spelling, so that names keep their capital.

    The first words of texts, which always have a capital, are not counted.
    """
    forms: dict[str, Counter[str]] = {}
    for text in texts:
        for form in WORD.findall(text)[1:]:
            forms.setdefault(form.lower(), Counter())[form] += 1
    return {word: counts.most_common(1)[0][0] for word, counts in forms.items()}


def _indexed(pairs: Pairs) -> tuple[list[str], list[str], list[tuple[list[int], list[int]]]]:
    """Returns the vocabularies of both languages, and each pair of sentences as word indices."""
    sides: tuple[dict[str, int], dict[str, int]] = ({NOTHING: 0}, {})
    sources = [[0, *_indices(words(source), sides[0])] for source, _ in pairs]
    targets = [_indices(words(target), sides[1]) for _, target in pairs]
    return list(sides[0]), list(sides[1]), list(zip(sources, targets, strict=True))


def _indices(sentence: list[str], vocabulary: dict[str, int]) -> list[int]:
    return [vocabulary.setdefault(word, len(vocabulary)) for word in sentence]


def _links(sentences: list[tuple[list[int], list[int]]]) -> tuple[Integers, Integers, int]:
    """Links every target word to every source word of its sentence pair.

    Returns the n links and the number T of target words in the corpus. The links are two arrays:
    (n, 2), the vocabulary indices of source and target word; and (n,), the position of the target
    word in the corpus, from 0 to T - 1.
    """
    links, token, tokens = [], [], 0
    for source, target in sentences:
        a, b = np.meshgrid(source, target)  # both (target length, source length)
        links.append(np.stack([a.ravel(), b.ravel()], 1))
        token.append(np.repeat(np.arange(tokens, tokens + len(target)), len(source)))
        tokens += len(target)
    return np.concatenate(links), np.concatenate(token), tokens


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def word_by_word(known: dict[str, str], text: str) -> str:
    """Replaces each word by its translation in `known`. Keeps the word order and unknown words."""
    joined = " ".join(known.get(word, word) for word in words(text))
    spaced = re.sub(r" ([.,])", r"\1", joined).replace("' ", "'")
    return spaced[:1].upper() + spaced[1:]
