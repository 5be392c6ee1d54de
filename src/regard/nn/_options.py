"""The options of the attention layers' `forward`, and checks of their combinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import packing
from .._tools.arguments import describe
from ..masks import Mask
from ..positions import Positions
from ._padding import finite_padding
from ._parallel import checked_parallel, shard_positions

if TYPE_CHECKING:
    from ..distributed import SequenceParallel


class Memory(NamedTuple):
    """Projected keys (..., Hkv, Lk, D) and values (..., Hkv, Lk, Dv) of a context."""

    k: Tensor
    v: Tensor


Context = Tensor | Memory | None


class CacheLike(Protocol):
    """The methods of a cache that the modules use: `len`, `lengths` and `attend`.

    `Attention` calls `attend(q, k, v, **options)`. `LatentAttention` calls
    `attend(q, latent, **options)`. Both forms of `attend` append the new tokens first.
    """

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Tensor: ...

    @property
    def attend(self) -> Callable[..., Any]: ...


class LayerOptions(NamedTuple):
    """The optional arguments of `forward` in `Attention` and `LatentAttention`."""

    mask: Mask | Tensor | None = None
    lengths: Tensor | None = None
    positions: Positions | None = None
    cu_seqlens: Tensor | None = None
    context_cu_seqlens: Tensor | None = None
    cache: CacheLike | None = None
    parallel: SequenceParallel | None = None

    def refuse(self, why: str, *names: str) -> None:
        """Raises ValueError, with the reason `why`, if one of the options `names` is not None."""
        for name in names:
            value = getattr(self, name)
            if value is not None:
                raise ValueError(f"{name}: expected None {why}, got {type(value).__name__}")

    def check(self, x: Tensor, context: Context, d_model: int) -> None:
        """Raises ValueError if x has a wrong shape or if two options cannot be combined."""
        if x.dim() not in (2, 3) or x.shape[-1] != d_model:
            raise ValueError(f"x: expected (..., L, d_model = {d_model}), got {describe(x)}")
        if context is None:
            self.refuse("without a context", "context_cu_seqlens")
        else:
            self.refuse("with a context (it is for self-attention)", "lengths", "positions", "cache")
        if self.parallel is not None:
            self.refuse("with parallel", "cache")
        if self.cu_seqlens is None:
            self.refuse("without cu_seqlens", "context_cu_seqlens")
            if self.cache is not None and x.dim() != 3:
                raise ValueError(f"x: expected (B, L, d_model) with a cache, got {describe(x)}")
            return
        self.refuse("with cu_seqlens", "lengths", "cache")
        if x.dim() != 2:
            raise ValueError(f"x: expected packed tokens (total, d_model) with cu_seqlens, got {describe(x)}")
        if context is not None and self.context_cu_seqlens is None:
            raise ValueError("context_cu_seqlens: expected (N + 1,) with cu_seqlens and a context, got None")

    def of_call(self, x: Tensor, context: Context) -> LayerOptions:
        """Returns the options with layouts of x and of its keys. Checks the lengths of shards."""
        if self.parallel is None:
            return self
        parallel = checked_parallel(self.parallel, "x", x)
        if context is None:
            return self._replace(parallel=parallel.of_queries)
        checked_parallel(parallel.of_keys, "context", context.k if isinstance(context, Memory) else context)
        return self

    def sample_mask(self) -> Mask | Tensor | None:
        """Returns the option `mask`. A tensor (B, Lq, Lk) becomes (B, 1, Lq, Lk)."""
        is_3d = isinstance(self.mask, Tensor) and self.mask.dim() == 3
        return self.mask.unsqueeze(1) if is_3d else self.mask  # type: ignore[union-attr]

    def finite(self, keys: Tensor, mask: Mask | None) -> Tensor:
        """Returns the tokens of the keys with zeros in padding that has NaN or Inf.

        Padding is what `lengths` and the masks of the call and of the layer declare. With a cache,
        masks are about the cached tokens, and packed tokens have no padding.
        """
        masks = (self.mask, mask) if self.cache is None and self.cu_seqlens is None else ()
        parallel = None if self.parallel is None else self.parallel.of_keys
        return finite_padding(keys, self.lengths, *masks, parallel=parallel)

    def token_positions(self, L: int) -> Positions:
        """Returns the option `positions`, or the default positions of L tokens if it is None."""
        if self.parallel is not None:
            whole = self._replace(parallel=None).token_positions(self.parallel.layouts[0].L)
            return shard_positions(whole, self.parallel)
        if self.positions is not None:
            return self.positions
        if self.cu_seqlens is not None:
            return _packed_positions(self.cu_seqlens, L)
        return 0 if self.cache is None else _positions_after(self.cache, L)


def _packed_positions(cu_seqlens: Tensor, L: int) -> Tensor:
    """Returns the positions (L,) of packed tokens. Every sequence starts at position 0."""
    positions = packing.positions(cu_seqlens)
    if len(positions) != L:
        raise ValueError(f"cu_seqlens: expected the last entry {L}, the tokens of x, got {len(positions)}")
    return positions


def _positions_after(cache: CacheLike, L: int) -> Positions:
    """Returns the positions of L new tokens that follow the cached tokens.

    The result is the first position, an int, if all samples have the same cached length. Otherwise
    it is a tensor (B, L).
    """
    start: int | None = getattr(cache, "start", None)  # saves reading `lengths` from the device
    if start is not None:
        return start
    longest, lengths = len(cache), cache.lengths
    if bool((lengths == longest).all()):
        return longest
    return lengths[:, None] + torch.arange(L, device=lengths.device)


def is_nested(name: str, x: Tensor) -> bool:
    """Returns whether x is a nested tensor. Raises TypeError if x is not a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
    return x.is_nested


def checked_mask(mask: Mask | None) -> Mask | None:
    """Returns the `mask` argument of a module's constructor unchanged.

    Raises TypeError if it is neither a Mask nor None.
    """
    if not (mask is None or isinstance(mask, Mask)):
        raise TypeError(f"mask: expected a Mask, such as masks.Causal(), or None, got {describe(mask)}")
    return mask
