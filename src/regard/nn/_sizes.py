"""How a module's width is shared by its heads."""

from __future__ import annotations

from typing import NamedTuple

from .._tools.arguments import count


class Sizes(NamedTuple):
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def sizes(
    d_model: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
) -> Sizes:
    """Those given, checked, and defaults for the others: Hkv = H, D = d_model / H, Dv = D."""
    d_model, heads = count("d_model", d_model, 1), count("heads", heads, 1)
    kv_heads = heads if kv_heads is None else count("kv_heads", kv_heads, 1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads: expected a divisor of heads = {heads}, got {kv_heads}")
    head_dim = _share(d_model, heads) if head_dim is None else count("head_dim", head_dim, 1)
    value_dim = head_dim if value_dim is None else count("value_dim", value_dim, 1)
    return Sizes(d_model, heads, kv_heads, head_dim, value_dim)


def _share(d_model: int, heads: int) -> int:
    if d_model % heads:
        raise ValueError(
            f"d_model: expected a multiple of heads = {heads}, or head_dim to be given, got {d_model}"
        )
    return d_model // heads
