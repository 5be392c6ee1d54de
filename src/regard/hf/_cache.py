"""`Cache`: the caches of `regard.cache` with the interface of a Transformers cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils as hf

from ..cache import KVCache, QuantizedCache, SlidingCache
from ._standin import StoredTensor

Maker = Callable[..., KVCache]  # called as maker(B, Hkv, D, Dv, dtype=..., device=...)


class CacheLayer(hf.CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer, in a cache of `regard.cache`.

    `update` returns stand-ins (see `_standin.py`) instead of dense keys and values. With
    `attn_implementation="regard"`, attention reads the storage in place.
    """

    is_croppable = True

    def __init__(self, make: Maker, dtype: torch.dtype | None, window: int | None) -> None:
        self.make, self.dtype, self.window = make, dtype, window
        self.is_sliding = window is not None
        self.held: KVCache | None = None  # built by the first update, from the shapes of its tensors

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.held is not None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self.held is None else StoredTensor(self.held.stored(), 0, self.outer)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.held is None else StoredTensor(self.held.stored(), 1, self.outer)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, Hkv, _, D = key_states.shape
        self.outer = key_states.dtype
        self.held = self.make(
            B, Hkv, D, value_states.shape[-1], dtype=self.dtype or self.outer, device=key_states.device
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Appends new tokens. Returns all keys and values that the new queries may attend to.

        The result is a pair of keys (B, Hkv, Lk, D) and values (B, Hkv, Lk, Dv).
        """
        if torch.compiler.is_compiling():
            return self._update_outside(key_states, value_states)
        return self._update(key_states, value_states)

    def _update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.held is None:
            self.lazy_initialization(k, v)
        held: Any = self.held
        if k.dtype is not held.dtype or v.dtype is not held.dtype:
            k, v = k.to(held.dtype), v.to(held.dtype)
        stored = held.extend(k, v)
        return StoredTensor(stored, 0, self.outer), StoredTensor(stored, 1, self.outer)

    _update_outside = torch.compiler.disable(_update)  # torch.compile cannot construct stand-ins

    def get_seq_length(self) -> int:
        return 0 if self.held is None else len(self.held)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many keys the next `update` will return, and the first key's position."""
        if self.held is None:
            return query_length, 0
        rows = self.held.rows_with(query_length)
        return rows, len(self.held) + query_length - rows

    def get_max_length(self) -> int:
        if self.window is not None:
            return self.window
        return -1 if self.held is None or self.held.capacity is None else self.held.capacity

    def reset(self) -> None:
        if self.held is not None:
            self.held.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens. `tokens_to_remove` is negative: -3 removes three tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected 0 or a negative number, got {tokens_to_remove}")
        if self.held is not None and tokens_to_remove:
            self.held.crop(len(self.held) + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.held is not None:
            self.held.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.held is not None:
            self.held.reorder(torch.arange(self.held.B).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.held is not None:
            self.held.reorder(torch.arange(self.held.B)[indices.cpu()])

    def __repr__(self) -> str:
        return "CacheLayer(empty)" if self.held is None else repr(self.held)


class Cache(hf.Cache):
    """A cache for `generate(past_key_values=...)` that appends tokens without copying older ones.

    Layers with full attention use a `KVCache` or, with `bits`, a `QuantizedCache`. Layers with a
    window or chunks use an unquantized `SlidingCache`. The attention implementation "regard" reads
    the storage in place. Other implementations receive dense tensors.

    Args:
        config: the model's config.
        dtype: the storage dtype. Default: the dtype of the first keys. If the storage dtype differs
            from the model's dtype, queries are rounded to the storage dtype for attention.
        bits: 8 or 4 to quantize keys and values, with a scale for each group of 32 channels. None:
            they are not quantized.
        capacity: the largest number of tokens. Storage for them is allocated at once, and appending
            more tokens raises. None: the storage grows by doubling.
        rollback: how many of the latest tokens can be removed again from layers with a window.
            Assisted generation needs this.
    """

    def __init__(
        self, config: Any, *, dtype: torch.dtype | None = None, bits: int | None = None,
        capacity: int | None = None, rollback: int = 0,
    ) -> None:  # fmt: skip
        def layer(kind: str, sliding_window: int | None = None, **unknown: Any) -> CacheLayer:
            if unknown or kind not in ("full_attention", "sliding_attention", "chunked_attention"):
                raise NotImplementedError(f"config: expected only attention layers, got {kind!r}")
            if sliding_window is not None:
                make: Maker = partial(SlidingCache, window=sliding_window, rollback=rollback)
            elif bits is not None:
                make = partial(QuantizedCache, bits=bits, capacity=capacity)
            else:
                make = partial(KVCache, capacity=capacity)
            return CacheLayer(make, dtype, sliding_window)

        kinds, options = hf.get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        super().__init__(layers=[layer(kind, **sizes) for kind, sizes in zip(kinds, options, strict=True)])

    @property
    def nbytes(self) -> int:
        """Bytes of allocated storage, including unused capacity."""
        layers: list[Any] = self.layers
        return sum(layer.held.nbytes for layer in layers if layer.held is not None)
