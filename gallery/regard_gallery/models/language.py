"""A language model by its place: the package of SmolLM2, a GGUF file, or a directory of transformers."""

from __future__ import annotations

from pathlib import Path

from . import smollm
from ._pretrained import from_directory
from .generate import LanguageModel


def load(path: Path | None = None, *, attention: str = "regard") -> LanguageModel:
    """SmolLM2 without a path. Nothing is downloaded, no code of a model is run, no pickle is read."""
    if path is None or path.suffix == ".gguf":
        return smollm.load(path, attention=attention)
    from transformers import AutoModelForCausalLM

    return LanguageModel(*from_directory(AutoModelForCausalLM, path, attention))
