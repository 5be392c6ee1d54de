"""Loads models for the explorer: MiniLM, a directory with a Transformers model, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import language, minilm
from ._pretrained import from_directory


def load(path: Path | None) -> tuple[Any, Any, str]:
    """Returns the model, its tokenizer and its name.

    Downloads nothing and runs no code that comes with a model.
    """
    if path is None:
        embedder = minilm.load()
        return embedder.model, embedder.tokenizer, "all-MiniLM-L6-v2"
    if path.suffix == ".gguf":
        loaded = language.load(path)
        return loaded.model, loaded.tokenizer, path.stem
    from transformers import AutoModel

    return *from_directory(AutoModel, path, "regard"), path.resolve().name
