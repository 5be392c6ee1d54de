"""Runs a Transformers model on a text and records a trace."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .. import see
from .._tools.arguments import describe
from ._trace import Trace, wanted

MAX_TOKENS = 4096
GROUP = "regard.explore"  # the entry point group in which a distribution registers `load` for model files
Model = str | Path | tuple[Any, Any] | None


def reader(model: Model = None) -> Callable[[str], Trace]:
    """Returns a function that runs a model on a text and returns the trace.

    `model` has the same meaning as in `explore.text`.
    """
    network, tokenizer, name = _load(model)
    if network.config.is_encoder_decoder:
        raise ValueError(f"model: expected an encoder or a decoder alone, got {type(network).__name__}")
    positions = getattr(network.config, "max_position_embeddings", MAX_TOKENS)
    limit = min(MAX_TOKENS, positions, tokenizer.model_max_length)

    def read(text: str) -> Trace:
        if not text.strip():
            raise ValueError("text: expected some text, got none")
        tokens = tokenizer(text)["input_ids"]
        if not 0 < len(tokens) <= limit:
            raise ValueError(f"text: expected from 1 to {limit} tokens for {name}, got {len(tokens)}")
        keys = tokenizer.convert_ids_to_tokens(tokens)
        seen = see.read(network, tokenizer, text, want=wanted(len(keys), len(keys), keys))
        return Trace(text, *(pieces(tokenizer, text),) * 2, tuple(seen.layers), model=name)

    return read


def _load(model: Model) -> tuple[Any, Any, str]:
    """Returns the model, its tokenizer, and the name of the model."""
    expected = "model: expected a pair of a model of Transformers and its tokenizer"
    if isinstance(model, tuple) and len(model) == 2:
        network, tokenizer = model
        return network, tokenizer, network.config.name_or_path or type(network).__name__
    if model is not None and not isinstance(model, str | Path):
        raise TypeError(f"{expected}, or a path, got {describe(model)}")
    for point in entry_points(group=GROUP, name="load"):
        loaded: tuple[Any, Any, str] = point.load()(None if model is None else Path(model))
        return loaded
    raise ModuleNotFoundError(
        f"{expected}, got {model!r}; the default model and model files come with the gallery: pip install "
        "regard-gallery"
    )


def pieces(tokenizer: Any, text: str) -> tuple[str, ...]:
    """Returns the substring of the text for each token of the text.

    A token without a substring, such as [CLS], is returned as the tokenizer's name for it.
    """
    encoding = tokenizer(text, return_offsets_mapping=tokenizer.is_fast)
    names = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    if not tokenizer.is_fast:
        return tuple(names)
    ranges = zip(encoding["offset_mapping"], names, strict=True)
    return tuple(text[first:end] or name for (first, end), name in ranges)
