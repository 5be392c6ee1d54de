"""One latent for each token, from which all heads take keys and values (multi-head latent attention)."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._call.spec import Bias
from .._call.stored import Stored
from .._tools.arguments import count
from ..masks import Mask
from ._cache import NOTHING, Asked, Chunk, Integers, Result, check_new, chunk_of
from ._rows import Part, Rows


class LatentCache(Rows):
    """Latents (B, n, rank + rope) of the tokens so far, for MLA with absorbed projections.

    A token's latent is its compressed vector c of `rank` channels, then its rotary key of `rope` channels. It
    is the key of all heads, and c is their value, in the same memory. The caller folds the projections of
    keys into the queries, and those of values into what follows:

        q = [q_content @ W_uk, q_rope],    out[h] @ W_uv[h]

    Args:
        B: samples.
        rank, rope: channels of the compressed vector and of the rotary key.
        capacity, dtype, device: as for `KVCache`.
    """

    def __init__(
        self,
        B: int,
        rank: int,
        rope: int,
        *,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.rank, self.rope = count("rank", rank, 1), count("rope", rope)
        self.D = self.rank + self.rope
        super().__init__(B, 1, (Part("latent", (self.D,), dtype),), capacity, dtype, device)

    def append(self, latent: Tensor, *, lengths: Integers | None = None) -> None:
        """Add latent (B, L, rank + rope); of sample b only the first lengths[b], if given."""
        chunk = self._chunk(latent, lengths)
        self._keep(self._draft((latent, None), chunk))

    @overload
    def attend(
        self, q: Tensor, latent: Tensor | None = None, *, scale: float, lengths: Integers | None = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: Literal[False] = False, impl: str = "auto",
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, latent: Tensor | None = None, *, scale: float, lengths: Integers | None = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: Literal[True], impl: str = "auto",
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, latent: Tensor | None = None, *, scale: float, lengths: Integers | None = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: bool = False, impl: str = "auto",
    ) -> Result: ...  # fmt: skip

    def attend(
        self,
        q: Tensor,
        latent: Tensor | None = None,
        *,
        scale: float,
        lengths: Integers | None = None,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        window: int | None = None,
        return_lse: bool = False,
        impl: str = "auto",
    ) -> Result:
        """Append latent (B, L, rank + rope), then attend causally with q (B, Hq, Lq, rank + rope).

        Returns out (B, Hq, Lq, rank). `scale` has no default, because 1 / sqrt(rank + rope) is never what a
        model was trained with: it is 1 / sqrt(size of a head before absorption, rotary channels included).
        All else is as in `KVCache.attend`.
        """
        if scale is None:
            raise TypeError("scale: expected a number, 1 / sqrt(size of a head before absorption), got None")
        plain = lengths is None and mask is None and bias is None and window is None
        if plain and latent is not None and (row := self._row_of_step(q, (latent, None))) is not None:
            return self._step(row, q, (latent, None), scale, softcap, sink, return_lse, impl)
        asked = Asked(mask, bias, scale, softcap, sink, window, return_lse, impl)
        if latent is None:
            if lengths is not None:
                raise ValueError("lengths: expected none without latent")
            return self._attend(q, None, NOTHING, asked)
        chunk = self._chunk(latent, lengths)
        return self._attend(q, (latent, None), chunk, asked)

    def _stored(self, parts: tuple[Tensor, ...], length: int) -> Stored:
        (latent,) = parts
        content = self._content if parts is self._parts else self._content_of(parts)
        return Stored(latent, content, None, None, None, 0, "float", length, self.D, self.rank)

    def _take(self, parts: tuple[Tensor, ...]) -> None:
        super()._take(parts)
        self._content = self._content_of(parts)

    def __getstate__(self) -> dict[str, Any]:
        # A view would be copied apart from what it views.
        return {name: value for name, value in self.__dict__.items() if name != "_content"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(self._parts)

    def _content_of(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The compressed vectors, a view: the values."""
        return parts[0].narrow(3, 0, self.rank)

    def _sizes(self) -> str:
        return f"rank={self.rank}, rope={self.rope}"

    def _chunk(self, latent: Tensor, lengths: Integers | None) -> Chunk:
        L = latent.shape[1] if isinstance(latent, Tensor) and latent.ndim == 3 else 0
        check_new("latent", latent, (self.B, L, self.D), self.dtype, self.device)
        return chunk_of(L, lengths, self.B)
