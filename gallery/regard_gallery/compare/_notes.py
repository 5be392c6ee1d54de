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


def denied(words: Mapping[str, str], values: Mapping[str, float], margin: float = 0.0) -> list[str]:
    """Returns the rankings "a < b" that `words` states but the measured `values` do not confirm.

    `words` rates each key, for example {"a": "low", "b": "high"}. The values rank a below b if
    values[b] is larger than values[a] by more than `margin`.
    """
    return [
        f"{low} < {high}"
        for low, high in permutations(words, 2)
        if RANKS[words[low]] < RANKS[words[high]] and not values[low] + margin < values[high]
    ]
