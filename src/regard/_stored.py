"""Keys and values as a cache keeps them: in rows or in pages, as numbers or as codes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # channels that share a scale
HALF = GROUP // 2


class Stored(NamedTuple):
    """Lk keys and values of B samples. Key j of a sample stands at position j.

    Without a table, k is (B, Hkv, capacity, D) and key j of sample b is row j of k[b]. With one, k is
    (pages, Hkv, page, D) and the key is row j % page of page table[b][j // page].

    `kind` says what is stored in groups of 32 channels, the last one filled up with zeros:
        "float": the numbers themselves, D of them, not in groups.
        "int8": x = code * scale; codes int8 from -127 to 127, scales float16 (..., groups).
        "int4": x = code * scale + low; codes 0 to 15 in 16 bytes for each group: byte i has channel i in its
            low half and channel i + 16 in its high half; scale and low float16 (..., groups, 2).
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    table: Tensor | None  # int32 (B, max_pages)
    page: int  # rows of a page, a power of two from 16 on; 0 without a table
    kind: str  # "float" | "int8" | "int4"
    length: int  # Lk
    D: int
    Dv: int

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """k (B, Hkv, Lk, D) and v (B, Hkv, Lk, Dv). Numbers keep their dtype, codes become `dtype`."""
        k, v = self._rows(self.k), self._rows(self.v)
        if self.k_scale is None or self.v_scale is None:
            return k, v
        k = decode(k, self._rows(self.k_scale), self.kind, self.D)
        v = decode(v, self._rows(self.v_scale), self.kind, self.Dv)
        return k.to(dtype), v.to(dtype)

    def _rows(self, x: Tensor) -> Tensor:
        """(B, Hkv, Lk, ...): the first Lk rows, collected from their pages if there is a table."""
        if self.table is None:
            return x.narrow(2, 0, self.length)
        used = self.table[:, : -(-self.length // self.page)]
        return x[used].transpose(1, 2).flatten(2, 3).narrow(2, 0, self.length)


def decode(codes: Tensor, scale: Tensor, kind: str, D: int) -> Tensor:
    """The numbers (..., D), in float32, that codes (..., groups * 32 or 16) stand for."""
    numbers: Tensor  # (..., groups, 32)
    if kind == "int8":
        numbers = codes.unflatten(-1, (-1, GROUP)) * scale.float().unsqueeze(-1)
    else:
        packed = codes.unflatten(-1, (-1, HALF))
        step, low = scale.float().unsqueeze(-2).unbind(-1)
        numbers = torch.cat([packed & 15, packed >> 4], -1) * step + low
    return numbers.flatten(-2)[..., :D]
