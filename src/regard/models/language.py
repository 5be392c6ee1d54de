"""A language model by its place: the package of SmolLM2, a GGUF file, or a directory of transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from . import smollm
from ._directory import checked
from ._implementation import implementation
from .generate import LanguageModel


def load(path: Path | None = None, *, attention: str = "regard") -> LanguageModel:
    """SmolLM2 without a path. Nothing is downloaded, no code of a model is run, no pickle is read."""
    if path is None or path.suffix == ".gguf":
        return smollm.load(path, attention=attention)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = checked(path)
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        attn_implementation=implementation(attention),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return LanguageModel(model.eval(), tokenizer)
