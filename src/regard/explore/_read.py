"""Texts as a model sees them. Models come from a package or a checked directory; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import see
from ..models import language, minilm
from ..models._pretrained import from_directory
from ._trace import Trace, wanted

MAX_TOKENS = 4096


def reader(path: Path | None = None) -> Callable[[str], Trace]:
    """A function from a text to its trace: with MiniLM, a directory of Transformers, or a GGUF file."""
    model, tokenizer, name = _loaded(path)
    known = getattr(model.config, "max_position_embeddings", MAX_TOKENS)
    limit = min(MAX_TOKENS, known, tokenizer.model_max_length)

    def read(text: str) -> Trace:
        if not text.strip():
            raise ValueError("text: expected some text, got none")
        tokens = tokenizer(text)["input_ids"]
        if not 0 < len(tokens) <= limit:
            raise ValueError(f"text: expected from 1 to {limit} tokens for {name}, got {len(tokens)}")
        keys = tokenizer.convert_ids_to_tokens(tokens)
        seen = see.read(model, tokenizer, text, want=wanted(len(keys), len(keys), keys))
        return Trace(text, *(pieces(tokenizer, text),) * 2, tuple(seen.layers), model=name)

    return read


def _loaded(path: Path | None) -> tuple[Any, Any, str]:
    if path is None:
        found = minilm.load()
        return found.model, found.tokenizer, "all-MiniLM-L6-v2"
    if path.suffix == ".gguf":
        loaded = language.load(path)
        return loaded.model, loaded.tokenizer, path.stem
    from transformers import AutoModel

    model, tokenizer = from_directory(AutoModel, path, "regard")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected an encoder or a decoder alone, got {type(model).__name__}")
    return model, tokenizer, path.resolve().name


def pieces(tokenizer: Any, text: str) -> tuple[str, ...]:
    """The tokens as they stand in the text; those that do not, as the tokenizer calls them."""
    found = tokenizer(text, return_offsets_mapping=tokenizer.is_fast)
    names = tokenizer.convert_ids_to_tokens(found["input_ids"])
    if not tokenizer.is_fast:
        return tuple(names)
    spans = zip(found["offset_mapping"], names, strict=True)
    return tuple(text[first:end] or name for (first, end), name in spans)
