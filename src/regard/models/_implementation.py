"""Which attention a model from transformers runs. The name comes from the caller, never from a file."""

from __future__ import annotations

NAMES = ("regard", "sdpa", "eager")


def implementation(name: str) -> str:
    """`name`, known to transformers from now on."""
    if name not in NAMES:
        raise ValueError(f"attention: expected one of {', '.join(NAMES)}, got {name!r}")
    if name == "regard":
        from ..hf import register

        register()
    return name
