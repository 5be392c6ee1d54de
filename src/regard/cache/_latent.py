"""The cache of multi-head latent attention (MLA): one latent per token for all heads."""

from __future__ import annotations

from typing import Literal, NoReturn, Unpack, overload

import torch
from torch import Tensor

from .._call.spec import Bias, Options, fast_new
from .._tools.arguments import count
from .._tools.words import hide_unknown, unknown_keyword
from ..masks import Mask
from ._attend import AttendKeywords, Result
from ._checks import Lengths
from ._retention import KeepAll
from ._row_cache import RowCache
from ._rows import layout_of


class LatentCache(RowCache):
    """A cache of latents (B, n, rank + rope), for MLA with absorbed projections.

    A latent is a compressed vector of `rank` channels followed by a rotary key of `rope` channels.
    All heads use the latent as key and its first `rank` channels as value. The caller folds the key
    projection W_uk into the queries and applies the value projection W_uv to the output:

        q = [q_content @ W_uk, q_rope],    out[h] @ W_uv[h]

    Args:
        B: batch size.
        rank, rope: number of channels of the compressed vector and of the rotary key.
        capacity, dtype, device: as in `KVCache`.
    """

    _sizes = ("B", "Hkv", "rank", "rope")

    def __init__(
        self, B: int, rank: int, rope: int, *, capacity: int | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.rope = count("rank", rank, 1), count("rope", rope)
        layout = layout_of(1, self.rank + self.rope, self.rank, "latent", dtype, device)
        self._begin(B, layout, KeepAll(capacity, type(self).__name__))

    def append(self, latent: Tensor, *, lengths: Lengths = None) -> None:
        """Appends latent (B, L, rank + rope).

        With `lengths` (B,), appends only the first lengths[b] tokens of sample b.
        """
        self._append((latent, None), lengths)

    @overload
    def attend(
        self, q: Tensor, latent: Tensor | None = None, *, scale: float,
        return_lse: Literal[False] = False, **options: Unpack[AttendKeywords],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, latent: Tensor | None = None, *, scale: float,
        return_lse: Literal[True], **options: Unpack[AttendKeywords],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, latent: Tensor | None = None, *, scale: float,
        return_lse: bool = False, **options: Unpack[AttendKeywords],
    ) -> Result: ...  # fmt: skip

    @hide_unknown
    def attend(
        self, q: Tensor, latent: Tensor | None = None, *, scale: float, lengths: Lengths = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None, softcap: float | None = None,
        sink: Tensor | None = None, window: int | None = None, return_lse: bool = False, impl: str = "auto",
        **unknown: NoReturn,
    ) -> Result:  # fmt: skip
        """Appends the latent, then attends causally. If the call raises, the cache is unchanged.

        Args:
            q: absorbed queries (B, Hq, Lq, rank + rope).
            latent: the latents of the new tokens (B, L, rank + rope). If None, nothing is appended.
            scale: 1 / sqrt(D), where D is the head size before absorption, rotary channels
                included. It has no default, because D is not rank + rope.

        The other arguments are as in `KVCache.attend`.

        Returns:
            out (B, Hq, Lq, rank). With `return_lse`, also the LSE (B, Hq, Lq).
        """
        if unknown:
            raise unknown_keyword(LatentCache.attend, unknown)
        if scale is None:
            raise TypeError("scale: expected a number, 1 / sqrt(head size before absorption), got None")
        options = fast_new(Options, (mask, None, bias, scale, softcap, sink, 0.0, None, return_lse))
        if latent is None and lengths is not None:
            raise ValueError("lengths: expected None without latent")
        return self._attend(q, None if latent is None else (latent, None), lengths, options, window, impl)
