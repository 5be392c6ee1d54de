"""How numbers are kept: the bytes of a row of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._call.spec import DTYPES
from .._tools.arguments import describe


@dataclass(frozen=True)
class Format:
    """`group` values take `group_bytes`, a group begun counts in full; a row takes `row_bytes` besides."""

    name: str
    group: int
    group_bytes: int
    row_bytes: int = 0

    def row(self, values: int) -> int:
        """Bytes of a row of so many values."""
        return -(-values // self.group) * self.group_bytes + self.row_bytes


FORMATS = {
    found.name: found
    for found in (
        Format("float64", 1, 8),
        Format("float32", 1, 4),
        Format("bfloat16", 1, 2),
        Format("float16", 1, 2),
        Format("int8", 32, 34),  # of `QuantizedCache`: codes, and a scale in float16
        Format("int4", 32, 20),  # codes, a scale and the low end
        Format("q8_0", 32, 34),  # of llama.cpp
        Format("q8_KV", 1, 1, 8),  # of ik_llama.cpp: one scale and one sum for a row
    )
}


def format_of(given: str | torch.dtype | Format) -> Format:
    """A format by its name or dtype, or itself."""
    if isinstance(given, Format):
        return given
    name = str(given).removeprefix("torch.")
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {describe(given)}")
    return FORMATS[name]


def dtype_of(name: str) -> torch.dtype:
    """A floating dtype by its name."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in known:
        raise ValueError(f"dtype: expected one of {', '.join(known)}, got {name!r}")
    return known[name]
