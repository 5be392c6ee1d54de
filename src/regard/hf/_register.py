"""The name `regard` in the tables of Transformers."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from ._attention import attention_forward
from ._masks import mask_tensor

NAME = "regard"


def register() -> None:
    """Make `attn_implementation="regard"` known to Transformers, for models loaded before or after.

    Example:
        >>> regard.hf.register()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="regard")
    """
    for name in (NAME, f"paged|{NAME}"):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, mask_tensor)
