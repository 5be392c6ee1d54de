"""Registers `regard` as an attention implementation of Transformers."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from ..convert._replace import declines_backends
from ._attention import NAME, attention_forward
from ._masks import mask_tensor
from ._sources import appends_to_mask


def register() -> None:
    """Registers `attn_implementation="regard"` with Transformers.

    Models that were loaded before this call can use the implementation too. Models that append to
    their mask (DeepSeek-V4) refuse it with a TypeError. Models that declare
    `_supports_attention_backend = False` (the audio tower of Gemma 4) keep their own attention.

    Example:
        >>> regard.hf.register()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="regard")
    """
    for name in (NAME, f"paged|{NAME}"):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, mask_tensor)
    _admit_to_continuous_batching()
    _refuse_unsupported_models()


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


def _refuse_unsupported_models() -> None:
    """Makes models that cannot use `regard` refuse it or keep the implementation they have.

    Wraps the method by which models check the name of an implementation.
    """
    original = PreTrainedModel.get_correct_attn_implementation
    if getattr(original, "_refuses", None) == NAME:
        return

    @functools.wraps(original)
    def check(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        kind: Any = type(self)
        if requested_attention in (NAME, f"paged|{NAME}"):
            if appends_to_mask(kind):
                expected = f"'eager' for {kind.__name__}, which appends to its mask"
                raise TypeError(f"attn_implementation: expected {expected}, got {requested_attention!r}")
            if declines_backends(kind):
                # A model under construction has the new name already, and gets its default instead.
                current = self.config._attn_implementation
                requested_attention = None if current == requested_attention else current
        return original(self, requested_attention, *args, **kwargs)

    check._refuses = NAME  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = check  # type: ignore[method-assign]
