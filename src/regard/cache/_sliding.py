"""The KV cache with a sliding window and attention sinks."""

from __future__ import annotations

import torch

from .._tools.arguments import count
from ._kv import KVCache
from ._retention import KeepWindow
from ._rows import layout_of


class SlidingCache(KVCache):
    """A KV cache of bounded size: the last `window` tokens and the first `sinks` tokens.

    The mask is `masks.streaming(window, sinks)`, as in StreamingLLM. Positions count all tokens of
    the sequence, including dropped tokens. `Alibi` and `RelativeBias` use these positions, too.

    `crop(n)` is possible if the cache still holds the keys that the next query attends to: if n is
    at most `rollback` below the greatest length so far, or n <= sinks, or nothing has been dropped.

    Args:
        B, Hkv, D, Dv, dtype, device: as in `KVCache`.
        window: number of tokens that a query attends to, including its own.
        sinks: number of tokens at the start of the sequence that are never dropped.
        rollback: number of tokens that `crop` can always remove, counted from the greatest length
            so far.
        spare: number of extra slots, default max(16, window / 4). The tokens to keep are moved once
            every `spare` new tokens.
    """

    _sizes = (*KVCache._sizes, "window", "sinks")

    def __init__(
        self, B: int, Hkv: int, D: int, Dv: int | None = None, *, window: int, sinks: int = 0,
        rollback: int = 0, spare: int | None = None, dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.window, self.sinks = count("window", window, 1), count("sinks", sinks)
        self.rollback = count("rollback", rollback)
        self.spare = max(16, window // 4) if spare is None else count("spare", spare, 1)
        keeps = KeepWindow(self.window, self.sinks, self.rollback, self.spare)
        self._begin(B, layout_of(Hkv, D, Dv, "float", dtype, device), keeps)
