"""Numbers and widths of a module's heads, and conversion between channels and heads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._tools.arguments import count
from ._module import CheckedModule


class HeadSizes(NamedTuple):
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def sizes(
    d_model: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None,
    value_dim: int | None = None,
) -> HeadSizes:  # fmt: skip
    """Checks the sizes of a module's heads. Defaults: Hkv = H, D = d_model / H, Dv = D."""
    d_model, heads = count("d_model", d_model, 1), count("heads", heads, 1)
    kv_heads = count("kv_heads", heads if kv_heads is None else kv_heads, 1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads: expected a divisor of heads = {heads}, got {kv_heads}")
    if head_dim is None and d_model % heads:
        expected = f"a multiple of heads = {heads}, or head_dim"
        raise ValueError(f"d_model: expected {expected}, got {d_model}")
    head_dim = count("head_dim", d_model // heads if head_dim is None else head_dim, 1)
    value_dim = count("value_dim", head_dim if value_dim is None else value_dim, 1)
    return HeadSizes(d_model, heads, kv_heads, head_dim, value_dim)


class GroupedHeads(CheckedModule):
    """A module with `heads` query heads that share `kv_heads` key heads."""

    def __init__(
        self, d_model: int, heads: int, kv_heads: int | None, head_dim: int | None, value_dim: int | None
    ) -> None:
        super().__init__()
        checked = sizes(d_model, heads, kv_heads, head_dim, value_dim)
        self.d_model, self.heads, self.kv_heads, self.head_dim, self.value_dim = checked

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Numbers of channels of all query heads, of all key heads, and of all value heads."""
        keys = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, keys, self.kv_heads * self.value_dim


Run = tuple[int, int]


def rows(units: Run, width: int, start: int = 0) -> Run:
    """Returns the rows of consecutive units of `width` rows each, the first of which is row `start`."""
    return start + units[0] * width, start + units[1] * width


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Splits channels into heads: (..., L, H * D) -> (..., H, L, D), a view."""
    split: Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(-3, -2)


def join_heads(x: Tensor) -> Tensor:
    """Concatenates the heads' channels: (..., H, L, D) -> (..., L, H * D)."""
    return x.transpose(-3, -2).flatten(-2)
