"""Projections around an attention of its own kind: what the sparse and the approximate modules share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import describe, probability
from .._problem import Trio
from ._sizes import sizes
from ._state import Whole


class Projected(Whole):
    """`query`, `key` and `value` make heads of tokens, `out` makes tokens of heads: Hugging Face's names.

    A module adds `attend(q, k, v, ...)`: its attention apart from the projections.
    """

    def __init__(
        self, d_model: int, heads: int, *, head_dim: int | None, bias: bool, out: bool, dropout: float,
        made: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.d_model, self.heads, _, self.head_dim, _ = sizes(d_model, heads, head_dim=head_dim)
        self.dropout = probability("dropout", dropout)
        inner = heads * self.head_dim
        self.query, self.key, self.value = (nn.Linear(d_model, inner, bias, **made) for _ in range(3))
        self.out = nn.Linear(inner, d_model, **made) if out else nn.Identity()

    def _check(self, x: Tensor, name: str = "x") -> None:
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"{name}: expected (B, L, d_model = {self.d_model}), got {describe(x)}")

    def _projected(self, x: Tensor) -> Trio:
        """q, k, v (B, H, L, D)"""
        return self._by_head(self.query(x)), self._by_head(self.key(x)), self._by_head(self.value(x))

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, L, H * D) -> (B, H, L, D), a view."""
        split: Tensor = x.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)

    def _finished(self, found: Tensor) -> Tensor:
        """(B, H, L, D) -> (B, L, d_model)"""
        out: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return out

    def _dropped(self) -> float:
        """The dropout of this call."""
        return self.dropout if self.training else 0.0


def real_tokens(lengths: Tensor, x: Tensor) -> Tensor:
    """bool (B, 1, L, 1) for x (B, H, L, D): the first n tokens of each sample."""
    if lengths.dim() != 1 or lengths.shape[0] != x.shape[0] or lengths.is_floating_point():
        raise ValueError(f"lengths: expected integers (B = {x.shape[0]},), got {describe(lengths)}")
    places = torch.arange(x.shape[2], device=x.device)
    return (places < lengths.to(x.device)[:, None])[:, None, :, None]
