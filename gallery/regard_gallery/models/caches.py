"""The kinds of cache that `regard generate` and `regard chat` offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Options of regard.hf.Cache for each kind of cache.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "bf16": {"dtype": torch.bfloat16},
    "int8": {"bits": 8},
    "int4": {"bits": 4},
}


def maker(model: Any, kind: str = "dense") -> Callable[[], Any]:
    """Returns a function that creates empty caches of a kind, such as "int8", for a model.

    If the model's attention is not `regard`, the caches are Transformers' own.
    """
    if kind not in KINDS:
        raise ValueError(f"cache: expected one of {', '.join(KINDS)}, got {kind!r}")
    attention = model.config._attn_implementation
    if attention == "regard":
        from regard.hf import Cache

        return lambda: Cache(model.config, **KINDS[kind])
    if kind != "dense":
        expected = f"dense with attention {attention}"
        raise ValueError(f"cache: expected {expected}, got {kind}; regard has all kinds")
    from transformers import DynamicCache

    return lambda: DynamicCache(config=model.config)
