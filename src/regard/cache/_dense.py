"""Keys and values as they come."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, is_grad_enabled

from .._arguments import count
from .._decode import attend_stored
from .._problem import Bias
from .._stored import Stored
from ..masks import Mask
from ._cache import NOTHING, Asked, Chunk, Integers, Result, check_new, chunk_of, most, plus
from ._rows import Part, Rows


class KVCache(Rows):
    """Keys (B, Hkv, n, D) and values (B, Hkv, n, Dv) of the tokens so far; samples may differ in length.

    Args:
        B, Hkv, D, Dv: samples, key heads, size of a key, size of a value (default D).
        capacity: room for so many tokens, allocated at once; a token more raises. None: grows, doubling, so
            that a token is copied less than twice on the average.
        dtype: of keys, values and queries. Nothing is cast.
        device: where the storage lies.

    Example:
        >>> cache = KVCache(1, 8, 64, capacity=4096)
        >>> out = cache.attend(q, k, v)            # the prompt: q (1, Hq, L, 64), k and v (1, 8, L, 64)
        >>> out = cache.attend(q1, k1, v1)         # one more token
    """

    def __init__(
        self,
        B: int,
        Hkv: int,
        D: int,
        Dv: int | None = None,
        *,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self._checked: tuple[Any, ...] | None = None  # what a step was like that passed all checks
        self.D = count("D", D, 1)
        self.Dv = self.D if Dv is None else count("Dv", Dv, 1)
        super().__init__(B, Hkv, self._layout(dtype), capacity, dtype, device)

    _shown: Mask | None = None  # which of its rows the last token sees; None: all

    def reorder(self, index: Integers) -> None:
        self._checked = None  # B may change
        super().reorder(index)

    def append(self, k: Tensor, v: Tensor, *, lengths: Integers | None = None) -> None:
        """Add k (B, Hkv, L, D) and v (B, Hkv, L, Dv); of sample b only the first lengths[b], if given."""
        chunk = self._chunk(k, v, lengths)
        self._keep(self._draft(self._encode(k, v), chunk))

    def extend(self, k: Tensor, v: Tensor) -> Stored:
        """`append`, for who attends himself: what queries of the new tokens look at, in place.

        These are the last `rows_with(L)` tokens. Valid until the cache changes again.
        """
        draft = self._draft(self._encode(k, v), self._chunk(k, v, None))
        self._keep(draft)
        return self._stored(draft.parts, most(draft.rows))

    def rows_with(self, L: int) -> int:
        """How many tokens queries look at in a call that appends L tokens to every sample."""
        return most(self._filled) + L

    def stored(self) -> Stored:
        """What is held, in place. Valid until the cache changes."""
        return self._stored(self._parts, most(self._filled))

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, lengths: Integers | None = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: Literal[False] = False, impl: str = "auto",
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, lengths: Integers | None = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: Literal[True], impl: str = "auto",
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, lengths: Integers | None = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: bool = False, impl: str = "auto",
    ) -> Result: ...  # fmt: skip

    def attend(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        lengths: Integers | None = None,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        window: int | None = None,
        return_lse: bool = False,
        impl: str = "auto",
    ) -> Result:
        """Append k and v, then attend causally: each query sees the tokens up to its own.

        If anything raises, the cache is as it was before.

        Args:
            q: (B, Hq, Lq, D): the last Lq tokens; mostly those of k.
            k, v: the new tokens, (B, Hkv, L, D) and (B, Hkv, L, Dv); without them nothing is appended.
            lengths: (B,): of sample b only the first lengths[b] new tokens are real. Then Lq = L, and rows of
                padding give zeros (LSE -inf).
            mask: narrows further what is seen, by position, as in `attention`.
            window: only the last `window` tokens are seen, the query's own included.
            bias, scale, softcap, sink, return_lse, impl: as in `attention`; Lk is `len(cache)` afterwards.

        Returns:
            out (B, Hq, Lq, Dv), and with `return_lse` the LSE (B, Hq, Lq).
        """
        plain = lengths is None and mask is None and bias is None and window is None
        row = self._row_of_step(q, k, v) if plain else None
        if row is not None:
            return self._step(row, q, k, v, scale, softcap, sink, return_lse, impl)  # type: ignore[arg-type]
        asked = Asked(mask, bias, scale, softcap, sink, window, return_lse, impl)
        if k is None or v is None:
            _check_none(k, v, lengths)
            return self._attend(q, None, NOTHING, asked)
        chunk = self._chunk(k, v, lengths)
        found = self._attend(q, self._encode(k, v), chunk, asked)
        if chunk.L == q.shape[2] == 1:
            self._checked = _signature(q, k, v)
        return found

    # The case that must be quick

    def _row_of_step(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> int | None:
        """Where one more token goes, if samples have one length, it is like one checked before, and fits."""
        row = self._filled
        if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
            return None
        if not isinstance(row, int) or row >= self._rows or self._checked != _signature(q, k, v):
            return None
        return None if (k.requires_grad or v.requires_grad) and is_grad_enabled() else row

    def _step(
        self,
        row: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        softcap: float | None,
        sink: Tensor | None,
        return_lse: bool,
        impl: str,
    ) -> Result:
        """What `_attend` does, for a query that sees all that its cache shows."""
        torch._foreach_copy_(self._slot(self._parts, row), self._encode(k, v))
        found = attend_stored(
            q, self._stored(self._parts, row + 1), mask=self._shown, scale=scale, softcap=softcap, sink=sink,
            return_lse=return_lse, impl=impl,
        )  # fmt: skip
        self._step_on()
        return found

    def _step_on(self) -> None:
        self._lengths = plus(self._lengths, 1)

    def _layout(self, dtype: torch.dtype) -> tuple[Part, ...]:
        return Part("k", (self.D,), dtype), Part("v", (self.Dv,), dtype)

    def _encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The new rows of each part."""
        return k, v

    def _stored(self, parts: tuple[Tensor, ...], length: int) -> Stored:
        k, v = parts
        return Stored(k, v, None, None, None, 0, "float", length, self.D, self.Dv)

    def _sizes(self) -> str:
        return f"D={self.D}, Dv={self.Dv}"

    def _chunk(self, k: Tensor, v: Tensor, lengths: Integers | None) -> Chunk:
        L = k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else 0
        check_new("k", k, (self.B, self.Hkv, L, self.D), self.dtype, self.device)
        check_new("v", v, (self.B, self.Hkv, L, self.Dv), self.dtype, self.device)
        return chunk_of(L, lengths, self.B)


def _signature(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    return q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, k.device, v.device


def _check_none(k: Tensor | None, v: Tensor | None, lengths: Integers | None) -> None:
    if k is not None or v is not None or lengths is not None:
        raise ValueError("k, v: expected both, or neither and no lengths")
