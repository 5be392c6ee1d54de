"""Masks, non-finite values and bitwise comparisons for contract tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import masks as M
from support.forward import INF

NAN = float("nan")


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Returns whether all tensors are bitwise equal. NaN equals NaN."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    pairs = [
        [x.contiguous().view(integers[x.element_size()]) for x in pair] for pair in zip(a, b, strict=True)
    ]
    return all(torch.equal(x, y) for x, y in pairs)


def rows_without_keys(kind: str, Lq: int, Lk: int, empty: slice) -> dict[str, Any]:
    """Returns options that fully mask exactly the query rows `empty`."""
    keep = torch.ones(Lq, Lk, dtype=torch.bool)
    keep[empty] = False
    if kind == "bool":
        return {"mask": keep}
    if kind == "bias":
        return {"bias": torch.zeros(Lq, Lk).masked_fill(~keep, -INF)}
    if kind == "row bias":
        return {"bias": torch.zeros(Lq, 1).masked_fill(~keep[:, :1], -INF)}
    if kind == "documents":
        return {"mask": M.Documents(torch.where(keep[:, 0], 1, 2), torch.ones(Lk, dtype=torch.int64))}
    return {"mask": M.Blocks(keep[:, :1].expand(Lq, Lk), 1)}


def broken_values(dtype: torch.dtype) -> list[Tensor]:
    """Returns NaN, -NaN, both infinities, and a NaN whose bits are all ones."""
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    ones = torch.tensor([-1], dtype=size).view(dtype)
    return [ones, *(torch.tensor([x], dtype=dtype) for x in (NAN, -NAN, INF, -INF))]


def block_patterns(keep: Tensor, Lq: int, Lk: int) -> M.Mask:
    """Returns blocks of 8 x 16 pairs that are empty, full, or one of two patterns from `keep`."""
    none = torch.zeros(1, 8, 16, dtype=torch.bool)
    table = torch.arange(-(-Lq // 8) * -(-Lk // 16)).reshape(-(-Lq // 8), -1) % 4
    return M.BlockPatterns(table, torch.cat([none, ~none, keep[:, 0, :8, :16]]))


def masks_over(Lq: int, Lk: int) -> dict[str, dict[str, Any]]:
    """Returns one mask of each kind. Each mask hides some keys from some rows."""
    keep = torch.rand(2, 2, Lq, Lk, generator=torch.Generator().manual_seed(3)) < 0.6
    hidden = torch.zeros(Lq, Lk).masked_fill(keep[0, 0] == 0, -INF)
    return {
        "causal": {"mask": M.Causal()},
        "window": {"mask": M.Window(11, 2)},
        "padding": {"mask": M.Lengths([Lk - 5, Lk // 3])},
        "packed": {"mask": M.Documents(torch.arange(Lk) // 23)},
        "packed causal": {"mask": M.Documents(torch.arange(Lk) // 23) & M.Causal()},
        "bool": {"mask": keep},
        "bias": {"bias": hidden},
        "prefix": {"mask": M.Causal() | M.Prefix(9)},
        "dilated": {"mask": M.Dilated(3) & M.Causal()},
        "global": {"mask": M.longformer((5, 5), [2, 40])},
        "random": {"mask": M.bigbird(8, causal=True)},
        "blocks": {"mask": M.Blocks(keep[0, 0, : -(-Lq // 8), : -(-Lk // 8)], 8)},
        "block patterns": {"mask": block_patterns(keep, Lq, Lk)},
        "per head": {"mask": M.PerHead([M.Causal(), M.Dilated(2)])},
        "inverted": {"mask": ~M.Window(6, 6)},
    }


KINDS = list(masks_over(40, 101))
