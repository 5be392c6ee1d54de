"""Loads Transformers models from local data. The caller chooses the implementation of attention.
Settings in the model's files cannot change it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._directory import checked

ATTENTIONS = ("regard", "sdpa", "eager")


def from_directory(kind: Any, path: Path, attention: str) -> tuple[Any, Any]:
    """Checks a model directory. Returns the model, of the class `kind`, and its tokenizer."""
    from transformers import AutoTokenizer

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model = _load(kind, checked(path), attention, use_safetensors=True, **local)
    return model, AutoTokenizer.from_pretrained(path, **local)


def from_state(kind: Any, config: Any, state: dict[str, Tensor], attention: str) -> Any:
    """Returns a model of the class `kind` with the tensors of `state`.

    Raises ValueError unless `state` has exactly the model's tensors.
    """
    return _load(kind, None, attention, ("unexpected_keys",), config=config, state_dict=state)


def _load(kind: Any, path: Path | None, attention: str, faults: tuple[str, ...] = (), **options: Any) -> Any:
    """Returns a model of the class `kind` in float32 and eval mode.

    Raises ValueError if tensors are missing, because Transformers would initialise them at random,
    or if the configuration is not valid or does not fit the weights. `faults` lists further entries
    of Transformers' loading info, such as "unexpected_keys", that must be empty.
    """
    from huggingface_hub.errors import StrictDataclassError

    options |= {"attn_implementation": _implementation(attention), "dtype": torch.float32}
    try:
        model, info = kind.from_pretrained(path, output_loading_info=True, **options)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"model: expected a configuration that fits its weights, got {error}") from None
    for fault in ("missing_keys", "mismatched_keys", *faults):
        if names := sorted(map(str, info[fault])):
            raise ValueError(f"model: {fault.replace('_', ' ')} in its weights: {', '.join(names[:5])}")
    return model.eval()


def _implementation(attention: str) -> str:
    if attention not in ATTENTIONS:
        raise ValueError(f"attention: expected one of {', '.join(ATTENTIONS)}, got {attention!r}")
    if attention == "regard":
        from regard.hf import register

        register()
    return attention
