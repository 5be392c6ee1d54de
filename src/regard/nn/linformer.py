"""Linformer: attention to a fixed number of mixtures of keys, made along the sequence."""

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
from ._projected import Projected

Sharing = Literal["none", "heads", "key-value"]


class LinformerProjection(CheckedModule):
    """E and F: matrices that mix up to `max_length` keys, and values, into `rank` of them.

    Args:
        max_length: the longest sequence; a shorter one of L tokens uses the first L rows.
        rank: mixtures that a query attends.
        sharing: "none": every head has its own E and F; "heads": all heads have the same E and the same F;
            "key-value": E is also F. To share between layers, give all of them this one object.
        heads: the number of heads, for "none".
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
        """Draws E and F uniformly within 1 / sqrt(rank)."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.rank**-0.5), self.rank**-0.5)

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Mixes k (B, H, L, D) and v (B, H, L, Dv) into (B, H, rank, D) and (B, H, rank, Dv)."""
        L = k.shape[2]
        if self.max_length < L:
            raise ValueError(f"x: expected at most max_length = {self.max_length} tokens, got {L}")
        F = self.E if self.F is None else self.F
        return self.E[:, :L].mT @ k, F[:, :L].mT @ v


class LinformerAttention(Projected):
    """softmax(q (E^T k)^T / sqrt(D)) (F^T v): every query attends `rank` mixtures of the keys.

    Time and memory are O(L * rank). It is an approximation, learned with E and F. Every mixture has a part of
    every token, so there is no causal form, and no cache: a new token would change all mixtures.

    Args:
        d_model: the width of the tokens.
        heads: the number of heads H.
        projection: E and F. One object given to several layers is shared by them.
        head_dim: D. Default d_model / heads.
        bias: whether the projections of queries, keys and values have biases.
        out: whether there is a last projection.
        dropout: of the weights, in training.

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
        """Attends from x (B, L, d_model) to the mixtures of the context (B, Lk, d_model), by default x.

        `lengths` (B,): the first n tokens of the context are real, the rest is padding and adds nothing.
        A mask, such as `masks.Causal()`, or a cache raises: no key stands for one token.
        """
        _refuse("mask", mask)
        _refuse("cache", cache)
        self._check(x)
        self._check(x if context is None else context, "context")
        return self._finished(self.attend(*self._projected(x, context), lengths=lengths))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Attends without the projections of tokens.

        q (B, H, L, D), k (B, H, Lk, D), v (B, H, Lk, Dv) -> (B, H, L, Dv)
        """
        self._check_heads(q, k, v, same_tokens=False)
        lengths = checked_lengths(lengths, k)
        if lengths is not None:
            padding = ~real_tokens(lengths, k)
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        return attention(q, *self.projection(k, v), dropout=self._dropped())


def _refuse(name: str, given: object) -> None:
    if given is not None:
        raise ValueError(
            f"{name}: expected None, got {describe(given)}; in a Linformer every key is a mixture of all "
            "tokens, so that no mask can hide the later ones and no cache can add one; LinearAttention, "
            "PerformerAttention and Attention with a window have causal forms"
        )
