"""Applications on real data. Each trains a small model, built from `regard.nn` modules, and
compares it with simple baselines.

`regard run NAME` runs an application. An application is a package with a class `App`. The packages
`_frame` and `_parts` contain the code that several applications share.
"""

from __future__ import annotations

from importlib import import_module

from ._frame.application import Application as Application, Recipe as Recipe, Scores as Scores
from ._frame.options import Options as Options
from ._frame.report import command as command
from ._frame.run import Report as Report, load as load, run as run

NAMES = {
    "text": "the stars of a review from its words: MiniLM with a classifier on clothing reviews",
    "translation": "English to French: an encoder-decoder with beam search on short sentences of Tatoeba",
    "plays": "the next word of a play: a decoder with rotary positions and grouped heads on Shakespeare",
    "source": "the next token of source code: a decoder with near and far layers on the standard library",
    "recommendation": "the film that a user rates next: a causal transformer on MovieLens-100k",
    "forecast": "the electricity demand of the next day: a patch transformer on half hours of a year",
    "graph": "the subject of a paper from its words and citations: a graph attention network on Cora",
    "control": "a pole balanced without seeing how fast it falls: a policy that attends to its history",
    "image": "the kind of clothing in a small image: a vision transformer on Fashion-MNIST",
    "emoji": "the name of an image never seen: two encoders and a contrastive loss (CLIP) on emoji",
    "speech": "digits in speech, by an encoder trained with CTC on spoken digits",
    "medical": "grey and white matter in slices of a brain: a U-Net with attention on MNI152",
}


def find(name: str) -> type[Application]:
    """Returns the class of the application `name`."""
    if name not in NAMES:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    application: type[Application] = import_module(f".{name}", __name__).App
    return application
