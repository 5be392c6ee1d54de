"""A sublayer with its residual connection and its norm, which stands before or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


class Residual(nn.Module):
    """A sublayer, its norm and the dropout of what it adds; `forward` says in which order."""

    def __init__(
        self, d_model: int, sublayer: nn.Module, *, norm: Norm = nn.LayerNorm, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm, self.sublayer, self.dropout = norm(d_model), sublayer, nn.Dropout(dropout)


class PreNorm(Residual):
    """x + dropout(sublayer(norm(x), ...)): trains without warm-up; a stack needs a norm at its end."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """x (..., d_model) -> the same shape; all else goes to the sublayer."""
        added: Tensor = self.dropout(self.sublayer(self.norm(x), *args, **options))
        return x + added


class PostNorm(Residual):
    """norm(x + dropout(sublayer(x, ...))), as in "Attention is all you need"."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """x (..., d_model) -> the same shape; all else goes to the sublayer."""
        normed: Tensor = self.norm(x + self.dropout(self.sublayer(x, *args, **options)))
        return normed
