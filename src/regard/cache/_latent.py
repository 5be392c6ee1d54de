"""One latent for each token, from which all heads take keys and values (multi-head latent attention)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from .._call.spec import Bias, Options, fast_new
from .._tools.arguments import count
from ..masks import Mask
from ._attend import AttendKeywords, Result
from ._checks import Lengths
from ._retention import KeepAll
from ._row_cache import RowCache
from ._rows import layout_of

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on


class LatentCache(RowCache):
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

    _sizes = ("B", "Hkv", "rank", "rope")

    def __init__(
        self, B: int, rank: int, rope: int, *, capacity: int | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.rope = count("rank", rank, 1), count("rope", rope)
        layout = layout_of(1, self.rank + self.rope, self.rank, "latent", dtype, device)
        self._begin(B, layout, KeepAll(capacity, type(self).__name__))

    def append(self, latent: Tensor, *, lengths: Lengths = None) -> None:
        """Appends latent (B, L, rank + rope); of sample b only the first lengths[b], if given."""
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

    def attend(
        self, q: Tensor, latent: Tensor | None = None, *, scale: float, lengths: Lengths = None,
        mask: Mask | Tensor | None = None, bias: Bias | None = None, softcap: float | None = None,
        sink: Tensor | None = None, window: int | None = None, return_lse: bool = False, impl: str = "auto",
    ) -> Result:  # fmt: skip
        """Appends latent (B, L, rank + rope), then attends causally with q (B, Hq, Lq, rank + rope).

        Returns out (B, Hq, Lq, rank). `scale` has no default, because 1 / sqrt(rank + rope) is never what a
        model was trained with: it is 1 / sqrt(size of a head before absorption, rotary channels included).
        All else is as in `KVCache.attend`.
        """
        if scale is None:
            raise TypeError("scale: expected a number, 1 / sqrt(size of a head before absorption), got None")
        options = fast_new(Options, (mask, None, bias, scale, softcap, sink, 0.0, None, return_lse))
        if latent is None and lengths is not None:
            raise ValueError("lengths: expected none without latent")
        return self._attend(q, None if latent is None else (latent, None), lengths, options, window, impl)
