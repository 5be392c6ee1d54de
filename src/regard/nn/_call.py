"""What `Attention` is called with besides tokens, and which of it goes together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import packing
from .._tools.arguments import describe
from ..masks import Dense, Mask
from ..positions import Positions


class Memory(NamedTuple):
    """The keys (..., Hkv, Lk, D) and values (..., Hkv, Lk, Dv) of a context, projected once."""

    k: Tensor
    v: Tensor


Context = Tensor | Memory | None


class CacheLike(Protocol):
    """What a module asks of a cache: how long its samples are, and to append and attend.

    `Attention` calls `attend(q, k, v, **options)`, `LatentAttention` `attend(q, latent, **options)`.
    """

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Tensor: ...

    @property
    def attend(self) -> Callable[..., Any]: ...


class Call(NamedTuple):
    """The options of `Attention.forward`."""

    mask: Mask | Tensor | None = None
    lengths: Tensor | None = None
    positions: Positions | None = None
    cu_seqlens: Tensor | None = None
    context_cu_seqlens: Tensor | None = None
    cache: CacheLike | None = None

    def refuse(self, why: str, *names: str) -> None:
        """Raise if one of these options is given."""
        for name in names:
            given = getattr(self, name)
            if given is not None:
                raise ValueError(f"{name}: expected None {why}, got {type(given).__name__}")


def check(call: Call, x: Tensor, context: Context) -> None:
    """Options that do not go together."""
    if context is None:
        call.refuse("without a context", "context_cu_seqlens")
    else:
        call.refuse("with a context: it speaks of self-attention", "lengths", "positions", "cache")
    if call.cu_seqlens is None:
        call.refuse("without cu_seqlens", "context_cu_seqlens")
        if call.cache is not None and x.dim() != 3:
            raise ValueError(f"x: expected (B, L, d_model) with a cache, got {describe(x)}")
        return
    call.refuse("with cu_seqlens, which say how long the sequences are", "lengths", "cache")
    if x.dim() != 2:
        raise ValueError(f"x: expected packed tokens (total, d_model) with cu_seqlens, got {describe(x)}")
    if context is not None and call.context_cu_seqlens is None:
        raise ValueError("context_cu_seqlens: expected the borders of the context as well, got None")


def is_nested(name: str, x: Tensor) -> bool:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
    return x.is_nested


def own_mask(mask: Mask | None) -> Mask | None:
    """The mask of every call, checked when a module is made."""
    if not (mask is None or isinstance(mask, Mask)):
        raise TypeError(f"mask: expected a Mask, such as masks.Causal(), or None, got {describe(mask)}")
    return mask


def both(a: Mask | None, b: Mask | Tensor | None) -> Mask | None:
    """What two masks allow together."""
    if not (b is None or isinstance(b, Mask | Tensor)):
        raise TypeError(f"mask: expected a Mask or a bool tensor (True = may attend), got {describe(b)}")
    other = Dense(b) if isinstance(b, Tensor) else b
    if a is None or other is None:
        return other if a is None else a
    return a & other


def places_in_row(cu_seqlens: Tensor, L: int) -> Tensor:
    """The places of packed tokens (L,), which begin anew in every sequence."""
    found = packing.positions(cu_seqlens)
    if len(found) != L:
        raise ValueError(f"cu_seqlens: expected borders that end at the {L} tokens of x, got {len(found)}")
    return found


def places_after(cache: CacheLike, L: int) -> Positions:
    """The places that follow those of a cache: an int if all samples are as long, which a cache may know."""
    start: int | None = getattr(cache, "start", None)
    if start is not None:
        return start
    longest, lengths = len(cache), cache.lengths
    if bool((lengths == longest).all()):
        return longest
    return lengths[:, None] + torch.arange(L, device=lengths.device)
