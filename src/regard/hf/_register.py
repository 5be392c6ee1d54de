"""Registers `regard` as an attention implementation of Transformers."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import ContinuousBatchingManager

from ._attention import NAME, attention_forward
from ._masks import mask_tensor


def register() -> None:
    """Registers `attn_implementation="regard"` with Transformers.

    Models that were loaded before this call can use the implementation too.

    Example:
        >>> regard.hf.register()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="regard")
    """
    for name in (NAME, f"paged|{NAME}"):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, mask_tensor)
    _admit_to_continuous_batching()


def _admit_to_continuous_batching() -> None:
    """Adds `regard` to the implementations that Transformers' continuous batching accepts.

    The list of accepted implementations is hard-coded in a method of the manager for continuous
    batching. This function wraps the method.
    """
    original = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if getattr(original, "_admits", None) == NAME:
        return

    @functools.wraps(original)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            original(self, model, *args, **kwargs)

    switch._admits = NAME  # type: ignore[attr-defined]
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch  # type: ignore[method-assign]
