"""Projections around an attention of its own kind: what the sparse and the approximate modules share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._call.spec import Trio
from .._tools.arguments import describe, holds_integers, probability, readable, tensor_of
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
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"{name}: expected (B, L, d_model = {self.d_model}), got {describe(x)}")

    @staticmethod
    def _check_heads(q: Tensor, k: Tensor, v: Tensor, *, same_tokens: bool = True) -> None:
        """Refuse all but (B, H, L, D), (B, H, Lk, D), (B, H, Lk, Dv); Lk = L if the tokens are the same."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.dim() != 4:
                raise ValueError(f"{name}: expected (B, H, L, D), got {describe(x)}")
        if k.shape[:3] != v.shape[:3] or (same_tokens and q.shape[2] != k.shape[2]):
            alike = "q, k and v of one length" if same_tokens else "k and v of one length"
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
            raise ValueError(f"q, k, v: expected {alike}, got {shapes}")

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


def checked_lengths(lengths: Tensor | None, x: Tensor) -> Tensor | None:
    """How many tokens of each sample of x (B, L, ...) are real, int64 (B,); None: all."""
    if lengths is None:
        return None
    B, L = x.shape[:2]
    given = tensor_of("lengths", lengths)
    if not holds_integers(given) or given.shape != (B,):
        raise ValueError(f"lengths: expected integers (B = {B},), got {describe(given)}")
    given = given.to(x.device, torch.int64)
    if readable(given) and B:
        low, high = (int(n) for n in torch.aminmax(given))
        if not 0 <= low <= high <= L:
            raise ValueError(f"lengths: expected from 0 to L = {L}, got values from {low} to {high}")
    return given


def real_tokens(lengths: Tensor, x: Tensor) -> Tensor:
    """bool (B, 1, L, 1) for x (B, H, L, D): the first n tokens of each sample."""
    places = torch.arange(x.shape[2], device=x.device)
    return (places < lengths[:, None])[:, None, :, None]
