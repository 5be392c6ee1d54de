"""The KV cache that quantises keys and values to 8 or 4 bits."""

from __future__ import annotations

import torch

from ._kv import KVCache
from ._quantization_error import KINDS, check_bits
from ._retention import KeepAll
from ._rows import layout_of


class QuantizedCache(KVCache):
    """A `KVCache` that stores 8 or 4 bits per channel, plus scales for each group of 32 channels.

    Attention uses the dequantised keys and values. A group of 32 channels takes 34 bytes with 8
    bits and 20 bytes with 4 bits. Without quantisation, in bfloat16, the group would take 64 bytes.
    On N(0, 1) data the relative error of the output is below 1 % with 8 bits and below 12 % with 4
    bits. `quantization_error` measures the error on your tensors.

    Args:
        B, Hkv, D, Dv, capacity, device: as in `KVCache`.
        bits: 8 or 4.
        dtype: dtype of the queries, keys and values passed in, and of the output.
    """

    _sizes = (*KVCache._sizes, "bits")

    def __init__(
        self, B: int, Hkv: int, D: int, Dv: int | None = None, *, bits: int = 8, capacity: int | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.bits = check_bits(bits)
        layout = layout_of(Hkv, D, Dv, KINDS[bits], dtype, device)
        self._begin(B, layout, KeepAll(capacity, type(self).__name__))
