"""Applications on real data: each trains a small model of `regard.nn` parts beside a plain baseline.

`regard run NAME` runs one. Everything they share is in the private files here; an application is one file
with a class `App`.
"""

from __future__ import annotations

from importlib import import_module

from ._application import Application as Application
from ._application import Recipe as Recipe
from ._application import Scores as Scores
from ._options import Options as Options
from ._options import arguments as arguments
from ._report import command as command
from ._run import Report as Report
from ._run import load as load
from ._run import run as run

NAMES = {
    "text": "the stars of a review from its words: MiniLM with a classifier on clothing reviews",
    "recommendation": "the film that a user rates next: a causal transformer on MovieLens-100k",
    "forecast": "the electricity demand of the next day: a patch transformer on half hours of a year",
    "graph": "the subject of a paper from its words and citations: a graph attention network on Cora",
}


def find(name: str) -> type[Application]:
    """The application of that name."""
    if name not in NAMES:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    found: type[Application] = import_module(f".{name}", __name__).App
    return found
