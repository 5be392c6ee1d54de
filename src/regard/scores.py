"""Score biases that are formulas of the distance between query and key, so that no n x n tensor is needed.

Query i stands at position `offset + i`, key j at position j. Unlike masks these values do not copy their
tensors: they carry parameters that learn.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from ._tools.arguments import Offset, brief, count, describe, first_position, same


class Alibi:
    """Attention with linear biases: `-slopes[h] * |pos - j|`. `slopes` is a float tensor (H,)."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = _parameter("Alibi(slopes)", slopes, 1, "(H,)")

    @classmethod
    def standard(
        cls, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Alibi:
        """The slopes of the paper: powers of 2^(-8/H), H being a power of two.

        For another H, those of the power of two below it, then every second one of the power of two above it.
        """
        heads = count("heads", heads, 1)
        whole = 2 ** int(math.log2(heads))
        slopes = _powers(whole) + _powers(2 * whole)[::2][: heads - whole]
        return cls(torch.tensor(slopes, dtype=dtype, device=device))

    @property
    def heads(self) -> int:
        return self.slopes.shape[0]

    def dense(self, Lq: int, Lk: int, offset: Offset = None) -> Tensor:
        """The bias (H, Lq, Lk), or (B, H, Lq, Lk) for an offset (B,)."""
        distance = _distance(Lq, Lk, offset, self.slopes.device).abs()
        return -self.slopes[:, None, None] * distance.unsqueeze(-3)

    def to(self, device: torch.device | str) -> Alibi:
        return Alibi(self.slopes.to(device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alibi) and same(self.slopes, other.slopes)

    def __hash__(self) -> int:
        return hash((Alibi, self.slopes.shape, self.slopes.dtype))

    def __repr__(self) -> str:
        return f"Alibi({brief(self.slopes)})"


class RelativeBias:
    """The bucketed relative bias of T5: `table[bucket(j - pos), h]`.

    `table` is a float tensor (num_buckets, Hq), as `relative_attention_bias.weight` of HF.
    """

    def __init__(self, table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> None:
        self.table = _parameter("RelativeBias(table)", table, 2, "(num_buckets, Hq)")
        if not isinstance(bidirectional, bool):
            raise TypeError(f"bidirectional must be a bool, got {describe(bidirectional)}")
        self.bidirectional = bidirectional
        buckets = table.shape[0]
        if buckets < 2 or (bidirectional and (buckets % 2 or buckets < 4)):
            expected = "an even number from 4 on" if bidirectional else "at least 2"
            raise ValueError(
                f"RelativeBias(table): num_buckets must be {expected} for bidirectional={bidirectional}, "
                f"got shape {tuple(table.shape)}"
            )
        exact = buckets // (4 if bidirectional else 2)
        self.max_distance = count("max_distance", max_distance, exact + 1)

    @property
    def heads(self) -> int:
        return self.table.shape[1]

    def dense(self, Lq: int, Lk: int, offset: Offset = None) -> Tensor:
        """The bias (H, Lq, Lk), or (B, H, Lq, Lk) for an offset (B,)."""
        bias = self.table[self.bucket(_distance(Lq, Lk, offset, self.table.device))]
        return bias.movedim(-1, -3)

    def by_distance(self, lo: int, hi: int) -> Tensor:
        """(H, hi - lo + 1): the bias at each distance pos - j from lo to hi inclusive."""
        distance = torch.arange(lo, hi + 1, device=self.table.device)
        return self.table[self.bucket(distance)].t().contiguous()

    def bucket(self, distance: Tensor) -> Tensor:
        """The row of the table for each distance pos - j."""
        side = self.table.shape[0] // 2 if self.bidirectional else self.table.shape[0]
        steps = torch.tensor(_buckets(side, self.max_distance), device=distance.device)
        if not self.bidirectional:
            return steps[distance.clamp(0, self.max_distance)]
        return steps[distance.abs().clamp(max=self.max_distance)] + side * (distance < 0)

    def in_dtype(self, dtype: torch.dtype) -> RelativeBias:
        """The same numbers in another precision, in which gradients are then summed."""
        return self._with(self.table.to(dtype))

    def to(self, device: torch.device | str) -> RelativeBias:
        return self._with(self.table.to(device))

    def _with(self, table: Tensor) -> RelativeBias:
        return RelativeBias(table, bidirectional=self.bidirectional, max_distance=self.max_distance)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RelativeBias)
            and self._options == other._options
            and same(self.table, other.table)
        )

    def __hash__(self) -> int:
        return hash((RelativeBias, self.table.shape, self.table.dtype, self._options))

    def __repr__(self) -> str:
        return (
            f"RelativeBias({brief(self.table)}, bidirectional={self.bidirectional}, "
            f"max_distance={self.max_distance})"
        )

    @property
    def _options(self) -> tuple[bool, int]:
        return self.bidirectional, self.max_distance


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _buckets(buckets: int, max_distance: int) -> tuple[int, ...]:
    return _computed_buckets(buckets, max_distance)


@functools.lru_cache(maxsize=64)
def _computed_buckets(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The bucket of each distance from 0 to max_distance: half of them exact, the rest logarithmic.

    Single precision, as in the models that were trained with it.
    """
    exact = buckets // 2
    far = np.arange(exact, max_distance + 1, dtype=np.float32) / np.float32(exact)
    share = np.log(far) / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    large = np.minimum(exact + share.astype(np.int64), buckets - 1)
    return (*range(exact), *large.tolist())


def _powers(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]


def _distance(Lq: int, Lk: int, offset: Offset, device: torch.device) -> Tensor:
    """pos - j: (Lq, Lk), or (B, Lq, Lk) for an offset (B,)."""
    queries = first_position(Lq, Lk, offset, device) + torch.arange(Lq, device=device)
    return queries[..., :, None] - torch.arange(Lk, device=device)


def _parameter(name: str, tensor: Tensor, dims: int, shape: str) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name} must be a float tensor {shape}, got {describe(tensor)}")
    if tensor.ndim != dims or 0 in tensor.shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    return tensor
