"""Loads language models: SmolLM2 from its package, a GGUF file, or a directory with a Transformers
model.
"""

from __future__ import annotations

from pathlib import Path

from . import smollm
from ._pretrained import from_directory
from .generate import LanguageModel


def load(path: Path | None = None, *, attention: str = "regard") -> LanguageModel:
    """Loads the language model at `path`, by default SmolLM2.

    Downloads nothing, runs no code that comes with a model and reads no pickle.
    """
    if path is None or path.suffix == ".gguf":
        return smollm.load(path, attention=attention)
    from transformers import AutoModelForCausalLM

    return LanguageModel(*from_directory(AutoModelForCausalLM, path, attention))
