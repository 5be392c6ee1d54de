"""Registers `regard` as an attention implementation of Transformers."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from .._tools.arguments import describe
from ..convert._replace import declines_backends
from ._attention import NAME, attention_forward
from ._masks import mask_tensor
from ._sources import appends_to_mask

_replaced: set[str] = set()  # names of implementations instead of which `regard` is used


def register(instead_of: str | None = None) -> None:
    """Registers `attn_implementation="regard"` with Transformers. `import regard.hf` does this, too.

    With `instead_of="flash_attention_2"`, models that request this implementation use `regard`, so
    that code and configurations for flash attention run on a CPU without the package flash_attn.
    `register()` undoes this for models that are loaded later.

    Models that were loaded before this call can use the implementation too. Models that append to
    their mask (DeepSeek-V4) refuse it with a TypeError. Models that declare
    `_supports_attention_backend = False` (the audio tower of Gemma 4) keep their own attention.

    Example:
        >>> import regard.hf
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="regard")
    """
    if not isinstance(instead_of, str | None):
        raise TypeError(
            f"instead_of: expected a name such as 'flash_attention_2', got {describe(instead_of)}"
        )
    _replaced.clear()
    _replaced.update(() if instead_of is None else (instead_of,))
    for name in (NAME, f"paged|{NAME}"):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, mask_tensor)
    _admit_to_continuous_batching()
    _refuse_unsupported_models()
    _translate_names()


def _translated(name: str | None) -> str | None:
    return NAME if name in _replaced else name


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
        requested_attention = _translated(requested_attention)
        if requested_attention in (NAME, f"paged|{NAME}"):
            if appends_to_mask(kind):
                expected = f"'eager' for {kind.__name__}, which appends to its mask"
                raise TypeError(f"attn_implementation: expected {expected}, got {requested_attention!r}")
            if declines_backends(kind):
                # A model under construction has the new name already, and gets its default instead.
                current = _translated(self.config._attn_implementation)
                requested_attention = None if current == requested_attention else current
        return original(self, requested_attention, *args, **kwargs)

    check._refuses = NAME  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = check  # type: ignore[method-assign]


def _translate_names() -> None:
    """Makes models use `regard` instead of the implementations in `_replaced`.

    Wraps the method that looks for the package flash_attn, before it does so.
    """
    original = PreTrainedModel._check_and_adjust_attn_implementation
    if getattr(original, "_translates", None) == NAME:
        return

    @functools.wraps(original)
    def check(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        return original(self, _translated(attn_implementation), *args, **kwargs)

    check._translates = NAME  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = check  # type: ignore[method-assign]
