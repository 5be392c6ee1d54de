"""Score biases that depend on the distance between query and key, without an Lq x Lk tensor.

Query i has position pos = offset + i, key j has position j. Biases do not copy their tensors, so
that gradients flow to parameters.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from ._tools.arguments import Offset, brief, count, describe, first_position, same


class Alibi:
    """The bias of ALiBi (attention with linear biases): `-slopes[h] * |pos - j|`.

    h is the head, pos the position of the query, and j the position of the key.

    Args:
        slopes: a float tensor (Hq,). `Alibi.standard(Hq)` has the slopes of the paper.

    Example:
        >>> regard.attention(q, k, v, mask=masks.Causal(), bias=scores.Alibi.standard(8))
    """

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = _parameter("Alibi(slopes)", slopes, 1, "(H,)")

    @classmethod
    def standard(
        cls, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Alibi:
        """Returns the bias with the slopes of the paper: powers of 2^(-8/H) if H is a power of two.

        For any other H, the slopes are those for the next lower power of two, followed by every
        second slope for the next higher power of two.
        """
        heads = count("heads", heads, 1)
        lower = 2 ** int(math.log2(heads))
        slopes = _powers(lower) + _powers(2 * lower)[::2][: heads - lower]
        return cls(torch.tensor(slopes, dtype=dtype, device=device))

    @property
    def heads(self) -> int:
        return self.slopes.shape[0]

    def dense(self, Lq: int, Lk: int, offset: Offset = None) -> Tensor:
        """Returns the bias as a tensor (H, Lq, Lk), or (B, H, Lq, Lk) for an offset (B,)."""
        distance = _distance(Lq, Lk, offset, self.slopes.device).abs()
        return -self.slopes[:, None, None] * distance.unsqueeze(-3)

    def of_heads(self, begin: int, end: int) -> Alibi:
        """Returns the bias of heads [begin, end)."""
        return Alibi(self.slopes[begin:end])

    def to(self, device: torch.device | str) -> Alibi:
        return Alibi(self.slopes.to(device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alibi) and same(self.slopes, other.slopes)

    def __hash__(self) -> int:
        return hash((Alibi, self.slopes.shape, self.slopes.dtype))

    def __repr__(self) -> str:
        return f"Alibi({brief(self.slopes)})"


class RelativeBias:
    """The bucketed relative position bias of T5: `table[bucket(pos - j), h]`.

    h is the head, pos the position of the query, and j the position of the key.

    Args:
        table: a float tensor (num_buckets, Hq), like `relative_attention_bias.weight` in Hugging
            Face's T5.
        bidirectional: if True, half of the buckets are for keys after the query. Otherwise all keys
            after the query share bucket 0.
        max_distance: all distances >= max_distance share the last bucket. If bidirectional, each
            direction has its own last bucket.
    """

    def __init__(self, table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> None:
        self.table = _parameter("RelativeBias(table)", table, 2, "(num_buckets, Hq)")
        if not isinstance(bidirectional, bool):
            raise TypeError(f"bidirectional: expected a bool, got {describe(bidirectional)}")
        self.bidirectional = bidirectional
        buckets = table.shape[0]
        if buckets < 2 or (bidirectional and (buckets % 2 or buckets < 4)):
            expected = "an even number of buckets >= 4" if bidirectional else "at least 2 buckets"
            raise ValueError(
                f"RelativeBias(table): expected {expected} for bidirectional={bidirectional}, "
                f"got shape {tuple(table.shape)}"
            )
        exact = buckets // (4 if bidirectional else 2)
        self.max_distance = count("max_distance", max_distance, exact + 1)

    @property
    def heads(self) -> int:
        return self.table.shape[1]

    def dense(self, Lq: int, Lk: int, offset: Offset = None) -> Tensor:
        """Returns the bias as a tensor (H, Lq, Lk), or (B, H, Lq, Lk) for an offset (B,)."""
        bias = self.table[self.bucket(_distance(Lq, Lk, offset, self.table.device))]
        return bias.movedim(-1, -3)

    def by_distance(self, lo: int, hi: int) -> Tensor:
        """Returns the bias (H, hi - lo + 1) for query minus key position = lo, ..., hi."""
        distance = torch.arange(lo, hi + 1, device=self.table.device)
        return self.table[self.bucket(distance)].t().contiguous()

    def bucket(self, distance: Tensor) -> Tensor:
        """Returns the index of the table row for each distance (query minus key position)."""
        side = self.table.shape[0] // 2 if self.bidirectional else self.table.shape[0]
        steps = torch.tensor(_buckets(side, self.max_distance), device=distance.device)
        if not self.bidirectional:
            return steps[distance.clamp(0, self.max_distance)]
        return steps[distance.abs().clamp(max=self.max_distance)] + side * (distance < 0)

    def in_dtype(self, dtype: torch.dtype) -> RelativeBias:
        """Returns the bias with its table cast to `dtype`.

        Gradients are then summed in `dtype`, too.
        """
        return self._with(self.table.to(dtype))

    def of_heads(self, begin: int, end: int) -> RelativeBias:
        """Returns the bias of heads [begin, end)."""
        return self._with(self.table[:, begin:end])

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


def _buckets(buckets: int, max_distance: int) -> tuple[int, ...]:
    return _computed_buckets(buckets, max_distance)


# The effect of torch.compiler.assume_constant_result, which would import the compiler.
_buckets._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=64)
def _computed_buckets(buckets: int, max_distance: int) -> tuple[int, ...]:
    """Returns the bucket of each distance from 0 to max_distance.

    Each bucket of the first half holds one distance. Each bucket of the second half holds a range
    of distances, and the ranges grow logarithmically. Computed in single precision, as in T5.
    """
    exact = buckets // 2
    far = np.arange(exact, max_distance + 1, dtype=np.float32) / np.float32(exact)
    share = np.log(far) / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    large = np.minimum(exact + share.astype(np.int64), buckets - 1)
    return (*range(exact), *large.tolist())


def _powers(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]


def _distance(Lq: int, Lk: int, offset: Offset, device: torch.device) -> Tensor:
    """Returns query minus key positions as (Lq, Lk), or as (B, Lq, Lk) for an offset (B,)."""
    queries = first_position(Lq, Lk, offset, device) + torch.arange(Lq, device=device)
    return queries[..., :, None] - torch.arange(Lk, device=device)


def _parameter(name: str, tensor: Tensor, dims: int, shape: str) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a float tensor {shape}, got {describe(tensor)}")
    if tensor.ndim != dims or 0 in tensor.shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    return tensor
