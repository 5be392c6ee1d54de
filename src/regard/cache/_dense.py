"""Keys and values as they come."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from .._api.stored import write_stored
from .._call.spec import Bias
from .._call.stored import Stored
from .._tools.arguments import count
from ..masks import Mask
from ._cache import NOTHING, Asked, Chunk, Integers, Result, check_new, chunk_of, most
from ._rows import Part, Rows, signature


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
        self.D = count("D", D, 1)
        self.Dv = self.D if Dv is None else count("Dv", Dv, 1)
        super().__init__(B, Hkv, self._layout(dtype), capacity, dtype, device)

    def append(self, k: Tensor, v: Tensor, *, lengths: Integers | None = None) -> None:
        """Add k (B, Hkv, L, D) and v (B, Hkv, L, Dv); of sample b only the first lengths[b], if given."""
        chunk = self._chunk(k, v, lengths)
        self._keep(self._draft((k, v), chunk))

    def extend(self, k: Tensor, v: Tensor) -> Stored:
        """`append`, for who attends himself: what queries of the new tokens look at, in place.

        These are the last `rows_with(L)` tokens. Valid until the cache changes again.
        """
        if (row := self._row_of_step(k, (k, v))) is not None:
            return self._extend_by_one(row, k, v)
        chunk = self._chunk(k, v, None)
        draft = self._draft((k, v), chunk)
        self._keep(draft)
        if chunk.L == 1:
            self._checked = signature(k, (k, v))
        return self._stored(draft.parts, most(draft.rows))

    def _extend_by_one(self, row: int, k: Tensor, v: Tensor) -> Stored:
        """`extend` by a token like one that was checked."""
        stored = self._stored(self._parts, row + 1)
        write_stored(stored, (row,) * self.B, (1,) * self.B, k, v)
        self._step_on()
        return stored

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
        if plain and k is not None and (row := self._row_of_step(q, (k, v))) is not None:
            return self._step(row, q, (k, v), scale, softcap, sink, return_lse, impl)
        asked = Asked(mask, bias, scale, softcap, sink, window, return_lse, impl)
        if k is None or v is None:
            _check_none(k, v, lengths)
            return self._attend(q, None, NOTHING, asked)
        chunk = self._chunk(k, v, lengths)
        return self._attend(q, (k, v), chunk, asked)

    def _layout(self, dtype: torch.dtype) -> tuple[Part, ...]:
        return Part("k", (self.D,), dtype), Part("v", (self.Dv,), dtype)

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


def _check_none(k: Tensor | None, v: Tensor | None, lengths: Integers | None) -> None:
    if k is not None or v is not None or lengths is not None:
        raise ValueError("k, v: expected both, or neither and no lengths")
