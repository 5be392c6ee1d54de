"""The result of an experiment that tests a claim: verdict and numbers, printed as a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERDICTS = ("right", "wrong", "incomplete", "undecided")


@dataclass(frozen=True)
class Finding:
    claim: str  # as the notes state it
    verdict: str  # one of VERDICTS, computed from the numbers
    measured: str  # the numbers that decide, in one line
    correct: str  # the correct statement
    numbers: Mapping[str, Any]  # all measured numbers by name

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict: expected one of {', '.join(VERDICTS)}, got {self.verdict!r}")

    def __str__(self) -> str:
        rows = {"claim": self.claim, **self.numbers, "verdict": self.verdict, "correct": self.correct}
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {shown(value)}" for name, value in rows.items())


def verdict(holds: bool, otherwise: str = "wrong") -> str:
    return "right" if holds else otherwise


def shown(value: Any) -> str:
    """Formats a value with few digits. Lists and dicts are formatted element by element."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {shown(x)}" for name, x in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)
