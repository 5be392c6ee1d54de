"""Keys and values as a cache keeps them: in rows or in pages, as numbers or as codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 32  # channels that share a scale
HALF = GROUP // 2
# New tokens: keys (B, Hkv, L, D), or (B, L, D) of one head; values, or None if they are a view of the keys.
New = tuple[Tensor, Tensor | None]
TOP = {"int8": 127, "int4": 15}  # the largest code


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

    def write(self, starts: Sequence[int], counts: Sequence[int], k: Tensor, v: Tensor | None) -> None:
        """The first counts[b] rows of k (B, Hkv, L, D) and v (B, Hkv, L, Dv) become rows starts[b] on.

        Without v only keys are written: values may be a view of them.
        """
        for x, target, scale in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            if x is not None and scale is None:
                self._put(target, starts, counts, x)
            elif x is not None and scale is not None:
                codes, scales = encode(x, self.kind)
                self._put(target, starts, counts, codes)
                self._put(scale, starts, counts, scales)

    def _put(self, target: Tensor, starts: Sequence[int], counts: Sequence[int], x: Tensor) -> None:
        """Rows of x (B, Hkv, L, ...) into target (B or pages, Hkv, rows, ...)."""
        if self.table is None and len({*starts}) == len({*counts}) == 1:
            target.narrow(2, starts[0], counts[0]).copy_(x.narrow(2, 0, counts[0]))
            return
        where, taken = self._places(starts, counts)
        target.transpose(1, 2).index_put_(where, x.transpose(1, 2)[taken])

    def _places(
        self, starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Sample (or page) and row of every new token, and its sample and number among the new ones."""
        found = [
            (b, i, start + i)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True))
            for i in range(n)
        ]
        sample, number, row = torch.tensor(found, device=self.k.device).reshape(-1, 3).long().unbind(1)
        if self.table is None:
            return (sample, row), (sample, number)
        return (self.table[sample, row // self.page].long(), row % self.page), (sample, number)

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


def encode(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of x (..., D), as `Stored` describes them. NaN and what overflows become NaN."""
    D, top = x.shape[-1], TOP[kind]
    spread = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], -D % GROUP)], -1) if D % GROUP else x
    groups = spread.float().unflatten(-1, (-1, GROUP))
    if kind == "int8":
        scale = (groups.abs().amax(-1) / top).half()
        codes = _rounded(groups / scale.float().unsqueeze(-1), -top, top)
        return _zero_padded(codes.flatten(-2), D).to(torch.int8), scale
    line = _line(groups)
    step, low = line.float().split(1, -1)
    codes = _zero_padded(_rounded((groups - low) / step, 0, top).flatten(-2), D).to(torch.uint8)
    first, second = codes.unflatten(-1, (-1, 2, HALF)).unbind(-2)
    return (first | second << 4).flatten(-2), line


def _line(groups: Tensor) -> Tensor:
    """Step and low (..., 2) in float16: least squares for the codes of the full range.

    On N(0, 1) the error is 4 % smaller than with the range itself.
    """
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / TOP["int4"]
    codes = _rounded((groups - low) / step, 0, TOP["int4"]).double()
    numbers, total = groups.double(), codes.sum(-1, keepdim=True)
    spread = codes.square().sum(-1, keepdim=True) - total.square() / GROUP
    sum_ = numbers.sum(-1, keepdim=True)
    fitted = ((codes * numbers).sum(-1, keepdim=True) - total * sum_ / GROUP) / spread
    step = torch.where(spread > 0, fitted, step).float()
    return torch.cat([step, ((sum_ - step.double() * total) / GROUP).float()], -1).half()


def _rounded(x: Tensor, least: int, top: int) -> Tensor:
    """0 / 0, in a group whose numbers are all equal, is code 0."""
    return x.round().nan_to_num(0).clamp(least, top)


def _zero_padded(codes: Tensor, D: int) -> Tensor:
    return codes if codes.shape[-1] == D else pad(codes[..., :D], (0, codes.shape[-1] - D))
