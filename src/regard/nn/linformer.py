"""Linformer: attention to a fixed number of learned linear combinations of the keys."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.types import Device

from .._api.attention import attention
from .._tools.arguments import count, describe
from ..masks import Mask
from ._lengths import checked_lengths, real_tokens
from ._module import CheckedModule
from ._options import CacheLike
from ._padding import finite_padding
from ._projected import Projected

Sharing = Literal["none", "heads", "key-value"]


class LinformerProjection(CheckedModule):
    """The matrices E and F (heads, max_length, rank) of Linformer attention.

    E projects L keys to `rank` keys, and F projects L values to `rank` values.

    Args:
        max_length: the maximum sequence length. A sequence of L tokens uses the first L rows.
        rank: the number of projected keys and values.
        sharing: "none": one E and one F per head. "heads": one E and one F for all heads.
            "key-value": one matrix for all heads, used as E and as F. Layers that receive the same
            `LinformerProjection` share its matrices.
        heads: the number of heads if sharing="none". Must be 1 otherwise.
    """

    _shown = ("max_length", "rank", "sharing", "heads")

    def __init__(
        self, max_length: int, rank: int, *, sharing: Sharing = "heads", heads: int = 1,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.max_length, self.rank = count("max_length", max_length, 1), count("rank", rank, 1)
        if sharing not in get_args(Sharing):
            raise ValueError(f"sharing: expected one of {', '.join(get_args(Sharing))}, got {sharing!r}")
        if sharing != "none" and heads != 1:
            raise ValueError(f"heads: expected 1 with sharing={sharing!r}, got {heads}")
        self.sharing, self.heads = sharing, count("heads", heads, 1)
        self.E = nn.Parameter(torch.empty(heads, max_length, rank, device=device, dtype=dtype))
        self.F = None if sharing == "key-value" else nn.Parameter(torch.empty_like(self.E))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws E and F from the uniform distribution on [-1 / sqrt(rank), 1 / sqrt(rank)]."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.rank**-0.5), self.rank**-0.5)

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Projects k (B, H, L, D) and v (B, H, L, Dv) to (B, H, rank, D) and (B, H, rank, Dv)."""
        L = k.shape[2]
        if self.max_length < L:
            raise ValueError(f"x: expected at most max_length = {self.max_length} tokens, got {L}")
        F = self.E if self.F is None else self.F
        return self.E[:, :L].mT @ k, F[:, :L].mT @ v


class LinformerAttention(Projected):
    """Linformer attention: (B, L, d_model) -> (B, L, d_model).

    Computes softmax(q (E^T k)^T / sqrt(D)) (F^T v) with learned matrices E and F (L, rank). Time
    and memory are O(L * rank). The result approximates softmax attention. Every projected key is a
    combination of all tokens, so there is neither a causal form nor a cache.

    Args:
        d_model: width of the input and of the output.
        heads: number of heads H.
        projection: the matrices E and F. Layers that receive the same object share the matrices.
        head_dim: D, the width of a head. Default: d_model / heads.
        bias: if True, the projections of queries, keys and values have biases.
        out: if True, the module has an output projection.
        dropout: dropout probability of the attention weights in training.

    Example:
        >>> projection = regard.nn.LinformerProjection(max_length=4096, rank=256)
        >>> layers = [regard.nn.LinformerAttention(512, 8, projection) for _ in range(4)]
        >>> layers[0](torch.randn(1, 3000, 512)).shape
        torch.Size([1, 3000, 512])
    """

    _shown = ("heads", "head_dim", "dropout")

    def __init__(
        self, d_model: int, heads: int, projection: LinformerProjection, *, head_dim: int | None = None,
        bias: bool = True, out: bool = True, dropout: float = 0.0, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, heads, head_dim, bias, out, dropout, device, dtype)
        if not isinstance(projection, LinformerProjection):
            raise TypeError(f"projection: expected a LinformerProjection, got {describe(projection)}")
        if projection.heads not in (1, heads):
            raise ValueError(f"projection: expected heads = 1 or {heads}, got {projection.heads}")
        self.projection = projection

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, lengths: Tensor | None = None,
        mask: Mask | Tensor | None = None, cache: CacheLike | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes attention from x to the projected keys of `context`. The output has x's shape.

        Args:
            x: (B, L, d_model).
            context: (B, Lk, d_model). Default: x.
            lengths: (B,), the number of real tokens of each context. The rest is padding and is
                ignored.
            mask, cache: must be None, because a projected key is a combination of all tokens.
        """
        _refuse("mask", mask)
        _refuse("cache", cache)
        self._check(x)
        self._check(x if context is None else context, "context")
        if context is None:
            x = finite_padding(x, lengths)
        else:
            context = finite_padding(context, lengths)
        return self._output(self.attend(*self._projected(x, context), lengths=lengths))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Projects k and v to `rank` rows each, with E and F, and attends to the projected rows.

        q (B, H, L, D), k (B, H, Lk, D), v (B, H, Lk, Dv) -> (B, H, L, Dv).
        """
        self._check_heads(q, k, v, same_tokens=False)
        lengths = checked_lengths(lengths, k)
        if lengths is not None:
            padding = ~real_tokens(lengths, k)
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        return attention(q, *self.projection(k, v), dropout=self._call_dropout())


def _refuse(name: str, value: object) -> None:
    if value is not None:
        raise ValueError(
            f"{name}: expected None, got {describe(value)}; in a Linformer every key is a mixture of all "
            "tokens; LinearAttention, PerformerAttention and Attention with a window have causal forms"
        )
