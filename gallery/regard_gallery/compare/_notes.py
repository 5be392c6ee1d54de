"""A table from study notes, which describes MHA, GQA, MQA and MLA by words such as "high"."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

NOTES = {
    "parameters": {"MHA": "high", "GQA-4": "medium", "MQA": "low", "MLA": "low"},
    "memory": {"MHA": "high", "GQA-4": "medium", "MQA": "low", "MLA": "very low"},
    "inference": {"MHA": "slow", "GQA-4": "medium", "MQA": "fast", "MLA": "fast"},
    "quality": {"MHA": "high", "GQA-4": "high", "MQA": "medium", "MLA": "high"},
}
RANKS = {"very low": 0, "low": 1, "slow": 1, "medium": 2, "high": 3, "fast": 3}


def leads(words: Mapping[str, str], values: Mapping[str, float]) -> dict[str, float]:
    """Maps each ranking "a < b" that `words` states to values[b] - values[a].

    `words` rates each key, for example {"a": "low", "b": "high"}.
    """
    return {
        f"{low} < {high}": values[high] - values[low]
        for low, high in permutations(words, 2)
        if RANKS[words[low]] < RANKS[words[high]]
    }


def denied(words: Mapping[str, str], values: Mapping[str, float], margin: float = 0.0) -> list[str]:
    """Returns the rankings of `words` that the measured `values` contradict by more than `margin`.

    Without a margin, equal values contradict a ranking.
    """
    found = leads(words, values)
    return [order for order, lead in found.items() if lead < -margin or (margin == 0 and lead == 0)]


def undecided(words: Mapping[str, str], values: Mapping[str, float], margin: float = 0.0) -> list[str]:
    """Returns the rankings of `words` whose measured `values` differ by at most `margin`.

    Without a margin, the values decide every ranking.
    """
    return [order for order, lead in leads(words, values).items() if margin > 0 and abs(lead) <= margin]
