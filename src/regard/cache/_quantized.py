"""Keys and values as codes of 8 or 4 bits."""

from __future__ import annotations

import torch

from ._kv import KVCache
from ._quantization_error import KINDS, check_bits
from ._retention import KeepAll
from ._rows import layout_of


class QuantizedCache(KVCache):
    """A `KVCache` that keeps 8 or 4 bits of each number, and a scale for each group of 32 channels.

    Attention is that over the dequantised content. On N(0, 1) the output is off by under 1 % with 8 bits and
    under 12 % with 4; `quantization_error` says how much on your tensors. A row takes for each group of 32
    channels 34 bytes (8 bits) or 20 (4 bits), where bfloat16 takes 64.

    Args:
        B, Hkv, D, Dv, capacity, dtype, device: as for `KVCache`; dtype is that of the tensors passed in and
            out.
        bits: 8 or 4.
    """

    _sizes = (*KVCache._sizes, "bits")

    def __init__(
        self, B: int, Hkv: int, D: int, Dv: int | None = None, *, bits: int = 8, capacity: int | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.bits = check_bits(bits)
        layout = layout_of(Hkv, D, Dv, KINDS[bits], dtype, device)
        self._begin(B, layout, KeepAll(capacity, type(self).__name__))
