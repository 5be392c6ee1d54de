"""The KV cache that keeps all tokens."""

from __future__ import annotations

from typing import Literal, NoReturn, Unpack, overload

import torch
from torch import Tensor

from .._api.stored import write_stored
from .._call.spec import Bias, Options, fast_new
from .._call.stored import Stored
from .._tools.words import hide_unknown, unknown_keyword
from ..masks import Mask
from ._attend import Result, ScaledKeywords
from ._checks import Lengths, pair_of
from ._counts import largest, per_sample
from ._retention import Content, KeepAll
from ._row_cache import RowCache, signature
from ._rows import layout_of


class KVCache(RowCache):
    """A KV cache of keys (B, Hkv, n, D) and values (B, Hkv, n, Dv). Samples may differ in length.

    Args:
        B, Hkv, D, Dv: batch size, key heads, size of a key, size of a value (default D).
        capacity: number of tokens per sample to allocate. Appending more raises ValueError. If
            None, the storage grows by doubling.
        dtype: dtype of keys, values and queries. Tensors of another dtype raise an error.
        device: device of the storage.

    Example:
        >>> cache = KVCache(1, 8, 64, capacity=4096)
        >>> out = cache.attend(q, k, v)       # prefill: q (1, Hq, L, 64), k and v (1, 8, L, 64)
        >>> out = cache.attend(q1, k1, v1)    # decode step
    """

    _sizes: tuple[str, ...] = ("B", "Hkv", "D", "Dv")

    def __init__(
        self, B: int, Hkv: int, D: int, Dv: int | None = None, *, capacity: int | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        layout = layout_of(Hkv, D, Dv, "float", dtype, device)
        self._begin(B, layout, KeepAll(capacity, type(self).__name__))

    def append(self, k: Tensor, v: Tensor, *, lengths: Lengths = None) -> None:
        """Appends k (B, Hkv, L, D) and v (B, Hkv, L, Dv).

        With `lengths` (B,), appends only the first lengths[b] tokens of sample b.
        """
        self._append((k, v), lengths)

    def extend(self, k: Tensor, v: Tensor) -> Stored:
        """Appends k (B, Hkv, L, D) and v (B, Hkv, L, Dv). Returns views of the stored tokens.

        This method is for callers that compute attention themselves. The views hold Lk tokens per
        sample, where Lk is `rows_with(L)` before the call. They are invalid after the next write.
        """
        if self._is_checked_step(k, (k, v)):
            storage, row, dropped = self._content
            stored = storage.stored(row + 1)  # type: ignore[operator]
            write_stored(stored, per_sample(row, self.B), (1,) * self.B, k, v)
            self._content = Content(storage, stored.length, dropped)
            return stored
        storage, held, _ = self._append((k, v), None)
        if k.shape[2] == 1:
            self._checked = signature(k, k, v)
        return storage.stored(largest(held))

    def rows_with(self, L: int) -> int:
        """Returns the number of keys, Lk, in a call that appends L tokens to every sample."""
        return self._keeps.rows_with(self._content, L)

    def stored(self) -> Stored:
        """Returns views of the stored keys and values. The next write invalidates the views."""
        return self._content.storage.stored(largest(self._content.held))

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
        return_lse: Literal[False] = False, **options: Unpack[ScaledKeywords],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
        return_lse: Literal[True], **options: Unpack[ScaledKeywords],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
        return_lse: bool = False, **options: Unpack[ScaledKeywords],
    ) -> Result: ...  # fmt: skip

    @hide_unknown
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, lengths: Lengths = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: bool = False, impl: str = "auto", **unknown: NoReturn,
    ) -> Result:  # fmt: skip
        """Appends k and v, then attends causally. If the call raises, the cache is unchanged.

        Args:
            q: queries (B, Hq, Lq, D) of the last Lq tokens, usually Lq = L.
            k, v: keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) of the new tokens. If both are
                None, nothing is appended.
            lengths: (B,): only the first lengths[b] new tokens of sample b are real, the rest is
                padding. With `lengths`, Lq must be L. The output of padding is zero (LSE -inf).
            mask: a mask as in `attention`, which further restricts the keys.
            window: attend only to the last `window` tokens, the query's position included.
            bias, scale, softcap, sink, return_lse, impl: as in `attention`, where Lk is
                `len(cache)` after the append.

        Returns:
            out (B, Hq, Lq, Dv). With `return_lse`, also the LSE (B, Hq, Lq).
        """
        if unknown:
            raise unknown_keyword(KVCache.attend, unknown)
        options = fast_new(Options, (mask, None, bias, scale, softcap, sink, 0.0, None, return_lse))
        return self._attend(q, pair_of(k, v, lengths), lengths, options, window, impl)
