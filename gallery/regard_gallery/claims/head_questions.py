"""Sentences with known answers, which ask heads for the subject of a verb or for a synonym of a noun.

Each noun and each verb is one token of MiniLM and of SmolLM2.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NOUNS = 6  # nouns of a sentence with synonyms

PERSONS = """doctor lawyer teacher student soldier writer king queen farmer judge driver pilot guard nurse
mayor bishop prince actor artist boy girl woman man baker priest sailor hunter singer coach clerk"""
VERBS = "helps sees follows thanks meets knows likes fears calls visits serves leads"
PLACES = "near", "behind", "beside", "with"
ADJECTIVES = "old", "young", "tall", "small", "happy", "angry", "famous", "clever"
OPENINGS = "", "today ", "at last ", "in the end "
SYNTAX = (  # {s} is the subject of {v}
    "{p} the {x}, the {s} {v} the {o}.",
    "{p} the {x} {q} the {y}, the {s} {v} the {o}.",
    "the {s} {p} the {x} {v} the {o}.",
    "{p} the {x}, the {s} {q} the {y} {v} the {o}.",
    "the {s} {p} the {x} {q} the {y} {v} the {o}.",
)
SYNONYMS = """car automobile, doctor physician, boat ship, house home, street road, child kid, film movie,
rock stone, shop store, forest woods, lawyer attorney, gift present, soldier warrior, garbage trash, hat cap,
coat jacket, picture photograph, meal dinner, hill mountain, sea ocean, story tale, journey trip,
town city, job work, teacher instructor, airplane plane, pupil student, writer author, baby infant,
illness sickness, error mistake, prison jail, money cash, gun pistol"""


class Question(NamedTuple):
    """A sentence, a word of it, and which of the sentence's nouns the word should attend to."""

    text: str
    word: str
    nouns: Sequence[str]  # in the order of the sentence, without the word itself
    answer: str


def syntax(count: int, causal: bool) -> list[Question]:
    """Returns questions for the subject of a verb. In a causal model, the object is not a choice.

    Openings and adjectives of random length shift the nouns, so that their positions tell little.
    """
    draw, found = random.Random(0), []
    for i in range(count):
        persons = dict(zip("soxy", draw.sample(PERSONS.split(), 4), strict=True))
        p, q = draw.sample(PLACES, 2)
        verb = draw.choice(VERBS.split())
        described = {
            letter: " ".join((*draw.sample(ADJECTIVES, draw.randrange(3)), person))
            for letter, person in persons.items()
        }
        text = SYNTAX[i % len(SYNTAX)].format(**described, v=verb, p=p, q=q)
        text = draw.choice(OPENINGS) + text
        choices = {person for letter, person in persons.items() if letter != "o" or not causal}
        nouns = [word for word in words(text) if word in choices]
        found.append(Question(text[0].upper() + text[1:], verb, nouns, persons["s"]))
    return found


def meaning(count: int, causal: bool) -> list[Question]:
    """Returns questions for the synonym of a noun. In a causal model, the synonym comes first."""
    draw, found = random.Random(0), []
    pairs = [pair.split() for pair in SYNONYMS.split(",")]
    for _ in range(count):
        pair, *others = draw.sample(pairs, NOUNS - 1)
        nouns = [*pair, *map(draw.choice, others)]
        draw.shuffle(nouns)
        text = f"They spoke about {', '.join(f'the {noun}' for noun in nouns[:-1])} and the {nouns[-1]}."
        first, last = sorted(pair, key=nouns.index)
        before = nouns[: nouns.index(last)] if causal else [noun for noun in nouns if noun != last]
        found.append(Question(text, last, before, first))
    return [question for question in found if len(question.nouns) > 1]


def words(text: str) -> list[str]:
    return text.replace(",", "").replace(".", "").lower().split()


def best_rule(questions: Iterable[Question]) -> float:
    """Returns how often the best rule is right that knows only the order of the nouns.

    A rule chooses the n-th noun of the sentence, or the n-th noun before or after the word.
    """
    questions = list(questions)
    right: Counter[tuple[str, int]] = Counter()
    for text, word, nouns, answer in questions:
        place, order = nouns.index(answer), words(text)
        before = sum(order.index(noun) < order.index(word) for noun in nouns)
        right.update([("from the start", place), ("from the word", place - before)])
    return max(right.values()) / len(questions)
