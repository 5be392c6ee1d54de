"""Keys and values as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from .._api.stored import write_stored
from .._call.spec import Bias, Options, fast_new
from .._call.stored import Stored
from ..masks import Mask
from ._attend import Result, ScaledKeywords
from ._checks import Lengths, pair_of
from ._counts import each, most
from ._retention import Content, KeepAll
from ._row_cache import RowCache, signature
from ._rows import layout_of

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on


class KVCache(RowCache):
    """Keys (B, Hkv, n, D) and values (B, Hkv, n, Dv) of the tokens so far; samples may differ in length.

    Args:
        B, Hkv, D, Dv: samples, key heads, size of a key, size of a value (default D).
        capacity: number of tokens that are allocated at once; a token more raises. None: grows, doubling, so
            that a token is copied less than twice on average.
        dtype: of keys, values and queries. Nothing is cast.
        device: of the storage.

    Example:
        >>> cache = KVCache(1, 8, 64, capacity=4096)
        >>> out = cache.attend(q, k, v)            # the prompt: q (1, Hq, L, 64), k and v (1, 8, L, 64)
        >>> out = cache.attend(q1, k1, v1)         # one more token
    """

    _sizes: tuple[str, ...] = ("B", "Hkv", "D", "Dv")

    def __init__(
        self, B: int, Hkv: int, D: int, Dv: int | None = None, *, capacity: int | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        layout = layout_of(Hkv, D, Dv, "float", dtype, device)
        self._begin(B, layout, KeepAll(capacity, type(self).__name__))

    def append(self, k: Tensor, v: Tensor, *, lengths: Lengths = None) -> None:
        """Appends k (B, Hkv, L, D) and v (B, Hkv, L, Dv); of sample b only the first lengths[b], if given."""
        self._append((k, v), lengths)

    def extend(self, k: Tensor, v: Tensor) -> Stored:
        """Appends, for callers that attend themselves. Returns the rows that queries of the new tokens see.

        These are the last `rows_with(L)` tokens, in place. They are invalid after the next change.
        """
        if self._is_checked_step(k, (k, v)):
            storage, row, dropped = self._content
            stored = storage.stored(row + 1)  # type: ignore[operator]
            write_stored(stored, each(row, self.B), (1,) * self.B, k, v)
            self._content = Content(storage, stored.length, dropped)
            return stored
        storage, held, _ = self._append((k, v), None)
        if k.shape[2] == 1:
            self._checked = signature(k, k, v)
        return storage.stored(most(held))

    def rows_with(self, L: int) -> int:
        """Returns how many tokens queries look at in a call that appends L tokens to every sample."""
        return self._keeps.rows_with(self._content, L)

    def stored(self) -> Stored:
        """Returns the rows held, in place. They are invalid after the next change."""
        return self._content.storage.stored(most(self._content.held))

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

    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, lengths: Lengths = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: bool = False, impl: str = "auto",
    ) -> Result:  # fmt: skip
        """Appends k and v, then attends causally: each query sees the tokens up to its own.

        If anything raises, the cache is as it was before.

        Args:
            q: (B, Hq, Lq, D): queries of the last Lq tokens; mostly those of k.
            k, v: the new tokens, (B, Hkv, L, D) and (B, Hkv, L, Dv); without them nothing is appended.
            lengths: (B,): of sample b only the first lengths[b] new tokens are real. Then Lq = L, and rows of
                padding give zeros (LSE -inf).
            mask: narrows further what is seen, by position, as in `attention`.
            window: only the last `window` tokens are seen, the query's own included.
            bias, scale, softcap, sink, return_lse, impl: as in `attention`; Lk is `len(cache)` afterwards.

        Returns:
            out (B, Hq, Lq, Dv), and with `return_lse` the LSE (B, Hq, Lq).
        """
        options = fast_new(Options, (mask, None, bias, scale, softcap, sink, 0.0, None, return_lse))
        return self._attend(q, pair_of(k, v, lengths), lengths, options, window, impl)
