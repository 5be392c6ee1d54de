"""Models of transformers from local data. Which attention they run is said by the caller, never by a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._directory import checked

ATTENTIONS = ("regard", "sdpa", "eager")


def from_directory(kind: Any, path: Path, attention: str) -> tuple[Any, Any]:
    """A model of the class `kind` and its tokenizer, from a directory that has been checked."""
    from transformers import AutoTokenizer

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model = _whole(kind, checked(path), attention, use_safetensors=True, **local)
    return model, AutoTokenizer.from_pretrained(path, **local)


def from_state(kind: Any, config: Any, state: dict[str, Tensor], attention: str) -> Any:
    """A model of the class `kind` with exactly these tensors."""
    return _whole(kind, None, attention, ("unexpected_keys",), config=config, state_dict=state)


def _whole(kind: Any, where: Path | None, attention: str, more: tuple[str, ...] = (), **given: Any) -> Any:
    """In evaluation, in float32. What transformers would draw at random, with a warning, is an error here."""
    try:
        model, found = kind.from_pretrained(
            where, attn_implementation=_implementation(attention), dtype=torch.float32,
            output_loading_info=True, **given,
        )  # fmt: skip
    except RuntimeError as error:  # tensors of other shapes than the configuration says
        raise ValueError(f"model: {error}") from None
    for fault in ("missing_keys", "mismatched_keys", *more):
        if names := sorted(map(str, found[fault])):
            raise ValueError(f"model: {fault.replace('_', ' ')} in its weights: {', '.join(names[:5])}")
    return model.eval()


def _implementation(attention: str) -> str:
    if attention not in ATTENTIONS:
        raise ValueError(f"attention: expected one of {', '.join(ATTENTIONS)}, got {attention!r}")
    if attention == "regard":
        from regard.hf import register

        register()
    return attention
