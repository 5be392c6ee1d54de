"""`Projected`: base class of the sparse and the approximate attention modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .._api.projection import Linear
from .._call.spec import QKV
from .._tools.arguments import describe, probability
from ._module import CheckedModule
from ._sizes import join_heads, sizes, split_heads


class Projected(CheckedModule):
    """A module with the projections `query`, `key`, `value` and `out`, named as in Hugging Face.

    Subclasses add `attend(q, k, v, ...)`, which computes attention without projections.
    """

    def __init__(
        self, d_model: int, heads: int, head_dim: int | None, bias: bool, out: bool, dropout: float,
        device: Device, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.d_model, self.heads, _, self.head_dim, _ = sizes(d_model, heads, head_dim=head_dim)
        self.dropout, inner = probability("dropout", dropout), heads * self.head_dim
        self.query, self.key, self.value = (Linear(d_model, inner, bias, device, dtype) for _ in range(3))
        self.out = Linear(inner, d_model, device=device, dtype=dtype) if out else nn.Identity()

    def _check(self, x: Tensor, name: str = "x") -> None:
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"{name}: expected (B, L, d_model = {self.d_model}), got {describe(x)}")

    @staticmethod
    def _check_heads(q: Tensor, k: Tensor, v: Tensor, *, same_tokens: bool = True) -> None:
        """Checks that the shapes are q (B, H, L, D), k (B, H, Lk, D) and v (B, H, Lk, Dv).

        If `same_tokens` is True, Lk must equal L.
        """
        named = {"q": q, "k": k, "v": v}
        for name, x in named.items():
            if not isinstance(x, Tensor) or x.dim() != 4:
                raise ValueError(f"{name}: expected (B, H, L, D), got {describe(x)}")
        if k.shape[:3] != v.shape[:3] or (same_tokens and q.shape[2] != k.shape[2]):
            expected = "q, k and v of one length" if same_tokens else "k and v of one length"
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
            raise ValueError(f"q, k, v: expected {expected}, got {shapes}")

    def _projected(self, x: Tensor, context: Tensor | None = None) -> QKV:
        """Returns q (B, H, L, D) from x, and k and v (B, H, Lk, D) from `context` (default: x)."""
        source = x if context is None else context
        q, k, v = self.query(x), self.key(source), self.value(source)
        return split_heads(q, self.heads), split_heads(k, self.heads), split_heads(v, self.heads)

    def _output(self, attended: Tensor) -> Tensor:
        """Applies the output projection: (B, H, L, D) -> (B, L, d_model)."""
        out: Tensor = self.out(join_heads(attended))
        return out

    def _call_dropout(self) -> float:
        """Returns the dropout probability of this call, which is 0 in evaluation mode."""
        return self.dropout if self.training else 0.0
