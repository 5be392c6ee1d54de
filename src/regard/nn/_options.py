"""The options of the attention layers' `forward`, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import packing
from .._tools.arguments import describe
from ..masks import Mask
from ..positions import Positions


class Memory(NamedTuple):
    """The keys (..., Hkv, Lk, D) and values (..., Hkv, Lk, Dv) of a context, projected once."""

    k: Tensor
    v: Tensor


Context = Tensor | Memory | None


class CacheLike(Protocol):
    """What a module needs of a cache: the lengths of its samples, and to append and attend.

    `Attention` calls `attend(q, k, v, **options)`, `LatentAttention` `attend(q, latent, **options)`.
    """

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Tensor: ...

    @property
    def attend(self) -> Callable[..., Any]: ...


class LayerOptions(NamedTuple):
    """The options of `forward` of `Attention` and `LatentAttention`."""

    mask: Mask | Tensor | None = None
    lengths: Tensor | None = None
    positions: Positions | None = None
    cu_seqlens: Tensor | None = None
    context_cu_seqlens: Tensor | None = None
    cache: CacheLike | None = None

    def refuse(self, why: str, *names: str) -> None:
        """Raises if one of these options is given."""
        for name in names:
            given = getattr(self, name)
            if given is not None:
                raise ValueError(f"{name}: expected None {why}, got {type(given).__name__}")

    def check(self, x: Tensor, context: Context, d_model: int) -> None:
        """Raises if the tokens have a wrong shape or the options do not go together."""
        if x.dim() not in (2, 3) or x.shape[-1] != d_model:
            raise ValueError(f"x: expected (..., L, d_model = {d_model}), got {describe(x)}")
        if context is None:
            self.refuse("without a context", "context_cu_seqlens")
        else:
            self.refuse("with a context: it speaks of self-attention", "lengths", "positions", "cache")
        if self.cu_seqlens is None:
            self.refuse("without cu_seqlens", "context_cu_seqlens")
            if self.cache is not None and x.dim() != 3:
                raise ValueError(f"x: expected (B, L, d_model) with a cache, got {describe(x)}")
            return
        self.refuse("with cu_seqlens, which say how long the sequences are", "lengths", "cache")
        if x.dim() != 2:
            raise ValueError(f"x: expected packed tokens (total, d_model) with cu_seqlens, got {describe(x)}")
        if context is not None and self.context_cu_seqlens is None:
            raise ValueError("context_cu_seqlens: expected the borders of the context as well, got None")

    def places(self, L: int) -> Positions:
        """Returns the places of L tokens: as given, from 0 in each sequence, or after those of the cache."""
        if self.positions is not None:
            return self.positions
        if self.cu_seqlens is not None:
            return _places_in_row(self.cu_seqlens, L)
        return 0 if self.cache is None else _places_after(self.cache, L)


def _places_in_row(cu_seqlens: Tensor, L: int) -> Tensor:
    """Returns the places of packed tokens (L,), which begin at 0 in every sequence."""
    found = packing.positions(cu_seqlens)
    if len(found) != L:
        raise ValueError(f"cu_seqlens: expected borders that end at the {L} tokens of x, got {len(found)}")
    return found


def _places_after(cache: CacheLike, L: int) -> Positions:
    """Returns the places that follow those of a cache: an int if all samples have the same length."""
    start: int | None = getattr(cache, "start", None)  # known without reading a tensor
    if start is not None:
        return start
    longest, lengths = len(cache), cache.lengths
    if bool((lengths == longest).all()):
        return longest
    return lengths[:, None] + torch.arange(L, device=lengths.device)


def is_nested(name: str, x: Tensor) -> bool:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
    return x.is_nested


def own_mask(mask: Mask | None) -> Mask | None:
    """Checks the mask that a module is made with."""
    if not (mask is None or isinstance(mask, Mask)):
        raise TypeError(f"mask: expected a Mask, such as masks.Causal(), or None, got {describe(mask)}")
    return mask
