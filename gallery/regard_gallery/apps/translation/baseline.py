"""A lexicon learned by IBM model 1 (Brown et al., 1993), and translation word by word."""

# By hand: nltk's IBMModel1 is several times slower, and breaks ties differently (other scores).

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
NOTHING = ""  # the NULL word, which is in every source sentence
WORD = re.compile(r"\w+'|\w+|[^\w\s]")  # "l'homme" is two words

Pairs = Sequence[tuple[str, str]]
Integers = NDArray[np.int64]


def lexicon(pairs: Pairs, rounds: int = ROUNDS) -> dict[str, str]:
    """Maps each source word to its most probable translation."""
    sources, targets, sentences = _indexed(pairs)
    links, token, tokens = _links(sentences)
    codes, entry = np.unique(links[:, 0] * len(targets) + links[:, 1], return_inverse=True)
    source = codes // len(targets)
    probability = np.ones(len(codes))  # of a target word, given the source word
    for _ in range(rounds):
        weight = probability[entry]
        weight /= np.bincount(token, weight, tokens)[token]  # a target word's links sum to 1
        expected = np.bincount(entry, weight, len(codes))
        probability = expected / np.bincount(source, expected, len(sources))[source]
    best = np.lexsort((-probability, source))
    first = np.unique(source[best], return_index=True)[1]
    likely = {sources[source[i]]: targets[codes[i] % len(targets)] for i in best[first]}
    spelling = _spelling(target for _, target in pairs)
    return {word: spelling.get(other, other) for word, other in likely.items() if word != NOTHING}


def _spelling(texts: Iterable[str]) -> dict[str, str]:
    """Maps lower-case words to their most frequent form inside sentences.

    Names keep their capital.
    """
    forms: dict[str, Counter[str]] = {}
    for text in texts:
        for form in WORD.findall(text)[1:]:
            forms.setdefault(form.lower(), Counter())[form] += 1
    return {word: counts.most_common(1)[0][0] for word, counts in forms.items()}


def _indexed(pairs: Pairs) -> tuple[list[str], list[str], list[tuple[list[int], list[int]]]]:
    """Returns the vocabularies of both languages, and the pairs as indices in them."""
    sides: tuple[dict[str, int], dict[str, int]] = ({NOTHING: 0}, {})
    sources = [[0, *_indices(words(source), sides[0])] for source, _ in pairs]
    targets = [_indices(words(target), sides[1]) for _, target in pairs]
    return list(sides[0]), list(sides[1]), list(zip(sources, targets, strict=True))


def _indices(sentence: list[str], vocabulary: dict[str, int]) -> list[int]:
    return [vocabulary.setdefault(word, len(vocabulary)) for word in sentence]


def _links(sentences: list[tuple[list[int], list[int]]]) -> tuple[Integers, Integers, int]:
    """Links every target word to every source word of its sentence.

    Returns the links (n, 2) as (source, target), each link's index of the target word in the corpus
    (n,), and the number of target words in the corpus.
    """
    links, token, tokens = [], [], 0
    for source, target in sentences:
        a, b = np.meshgrid(source, target)  # (target, source)
        links.append(np.stack([a.ravel(), b.ravel()], 1))
        token.append(np.repeat(np.arange(tokens, tokens + len(target)), len(source)))
        tokens += len(target)
    return np.concatenate(links), np.concatenate(token), tokens


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def word_by_word(known: dict[str, str], text: str) -> str:
    """Replaces each word by its translation, in the same order. Keeps unknown words."""
    joined = " ".join(known.get(word, word) for word in words(text))
    spaced = re.sub(r" ([.,])", r"\1", joined).replace("' ", "'")
    return spaced[:1].upper() + spaced[1:]
