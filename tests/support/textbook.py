"""The attention of textbooks, in plain PyTorch, with any names of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

CAPITALS = ("W_Q", "W_K", "W_V", "W_O")


class TextbookAttention(nn.Module):
    """Multi-head attention with four linear layers under the given names, and optionally a norm.

    E_q, E_k and E_v are the widths of the inputs, d_k and d_v the widths of a head. With `norm`, the
    name of a LayerNorm, `forward` returns norm(q + attention). Without a fourth name there is no
    output projection.
    """

    def __init__(
        self, E_q: int, heads: int, *, E_k: int | None = None, E_v: int | None = None, d_k: int | None = None,
        d_v: int | None = None, names: Sequence[str] = CAPITALS, norm: str | None = None, bias: bool = True,
        eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.d_k = heads, E_q // heads if d_k is None else d_k
        d_v = self.d_k if d_v is None else d_v
        inputs = (E_q, E_q if E_k is None else E_k, E_q if E_v is None else E_v)
        for name, width, size in zip(names, inputs, (self.d_k, self.d_k, d_v), strict=False):
            self.add_module(name, nn.Linear(width, heads * size, bias=bias))
        if len(names) == 4:
            self.add_module(names[3], nn.Linear(heads * d_v, E_q, bias=bias))
        if norm is not None:
            self.add_module(norm, nn.LayerNorm(E_q, eps=eps))
        self.names, self.norm_name = tuple(names), norm

    def forward(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the output and the weights (B, H, Lq, Lk). In the mask, 0 means "may not attend"."""
        k = q if k is None else k
        inputs = zip((q, k, k if v is None else v), self.names, strict=False)
        Q, K, V = (self._split(self.get_submodule(name)(x)) for x, name in inputs)
        scores = Q @ K.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = torch.softmax(scores, -1)
        out = (weights @ V).transpose(1, 2).flatten(2)
        if len(self.names) == 4:
            out = self.get_submodule(self.names[3])(out)
        return out if self.norm_name is None else self.get_submodule(self.norm_name)(out + q), weights

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
