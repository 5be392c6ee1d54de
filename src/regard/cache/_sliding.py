"""The last tokens alone, and the first few."""

from __future__ import annotations

import torch

from .._tools.arguments import count
from ._kv import KVCache
from ._retention import KeepWindow
from ._rows import layout_of


class SlidingCache(KVCache):
    """The last `window` tokens and the first `sinks`, in bounded memory.

    Each query sees what it would see under `Causal() & (Window(window - 1) | Prefix(sinks))`: the last
    `window` tokens, its own included, and the first `sinks` of the sequence (as StreamingLLM keeps them).
    Positions are the true ones, also for `Alibi` and `RelativeBias`, however much has been dropped.

    `crop(n)` needs the tokens that the next one sees. They are held for the last `rollback` tokens, for n up
    to `sinks`, and as long as nothing was dropped.

    Args:
        B, Hkv, D, Dv, dtype, device: as for `KVCache`.
        window: tokens that a query sees, its own included.
        sinks: first tokens that stay.
        rollback: tokens that `crop` can always take back, counted from the greatest length so far.
        spare: rows beyond those needed; default window / 4, at least 16. Tokens move once in `spare` tokens.
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
