"""Caches for generation, by the name of what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# What regard.hf.Cache is told.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "bf16": {"dtype": torch.bfloat16},
    "int8": {"bits": 8},
    "int4": {"bits": 4},
}


def maker(model: Any, kind: str = "dense") -> Callable[[], Any]:
    """Makes empty caches for a model: ours where the model runs our attention, else that of transformers."""
    if kind not in KINDS:
        raise ValueError(f"cache: expected one of {', '.join(KINDS)}, got {kind!r}")
    attention = model.config._attn_implementation
    if attention == "regard":
        from regard.hf import Cache

        return lambda: Cache(model.config, **KINDS[kind])
    if kind != "dense":
        wanted = f"dense with attention {attention}"
        raise ValueError(f"cache: expected {wanted}, got {kind}; regard has all kinds")
    from transformers import DynamicCache

    return lambda: DynamicCache(config=model.config)
