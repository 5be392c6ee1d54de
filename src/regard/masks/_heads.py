"""`of_heads`: the mask of some query heads of a call."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from ._atoms import BlockPatterns, Blocks, Dense
from ._mask import Combination, Mask, PerHead

M = TypeVar("M", bound=Mask)


def of_heads(mask: Mask, heads: tuple[int, int], all_heads: int) -> Mask:
    """Returns the mask of query heads [heads[0], heads[1]) of a call with `all_heads` heads.

    Returns the mask itself if it is the same for all heads.
    """
    begin, end = heads
    if isinstance(mask, PerHead):
        _check(len(mask.masks), all_heads)
        return PerHead([of_heads(x, heads, all_heads) for x in mask.masks[begin:end]])
    if isinstance(mask, Combination):
        parts = tuple(of_heads(x, heads, all_heads) for x in mask.masks)
        changed = any(part is not x for part, x in zip(parts, mask.masks, strict=True))
        return _replaced(mask, "masks", parts) if changed else mask
    name = "keep" if isinstance(mask, Dense) else "table"
    if not isinstance(mask, Dense | Blocks | BlockPatterns):
        return mask
    by_head: Tensor = getattr(mask, name)
    if by_head.ndim < 3 or by_head.shape[-3] == 1:
        return mask
    _check(by_head.shape[-3], all_heads)
    return _replaced(mask, name, by_head.narrow(-3, begin, end - begin))


def _replaced(mask: M, name: str, value: object) -> M:
    return mask._of(*(value if field == name else content for field, content in mask._items()))


def _check(heads: int, all_heads: int) -> None:
    if heads != all_heads:
        raise ValueError(f"mask: expected a mask of 1 or Hq = {all_heads} heads, got {heads}")
