"""Builds stored keys and values from tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._call.stored import GROUP, Stored

KINDS = ("float", "int8", "int4")


def quantised(x: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Quantises x (..., D). Returns codes and scales."""
    if kind == "float":
        return x, None
    groups = -(-x.shape[-1] // GROUP)
    x = torch.nn.functional.pad(x.float(), (0, groups * GROUP - x.shape[-1])).unflatten(-1, (groups, GROUP))
    if kind == "int8":
        scale = (x.abs().amax(-1) / 127).half()
        return (x / scale[..., None].float()).nan_to_num().round().clamp(-127, 127).flatten(-2).char(), scale
    low, high = x.aminmax(dim=-1)
    low, scale = low.half(), ((high - low) / 15).half()
    codes = ((x - low[..., None].float()) / scale[..., None].float()).nan_to_num().round().clamp(0, 15).byte()
    return (codes[..., :16] | codes[..., 16:] << 4).flatten(-2), torch.stack([scale, low], -1)


def in_pages(x: Tensor | None, page: int, table: Tensor, pages: int) -> Tensor | None:
    """Copies (B, H, L, ...) into pages (pages, H, page, ...).

    Unused slots are NaN or the largest code.
    """
    if x is None:
        return None
    B, H, L = x.shape[:3]
    unused = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    out = x.new_full((pages, H, page, *x.shape[3:]), unused)
    for b in range(B):
        for at in range(0, L, page):
            n = min(page, L - at)
            out[int(table[b, at // page]), :, :n] = x[b, :, at : at + n]
    return out


def store(k: Tensor, v: Tensor, kind: str, page: int, spare: int = 2) -> Stored:
    """Stores k and v in shuffled pages, or contiguously with free capacity.

    The page table has `spare` unused columns.
    """
    B, _, L, D = k.shape
    tensors = [tensor for x in (k, v) for tensor in quantised(x, kind)]
    table = None
    if page:
        count = -(-L // page)
        pages = B * count + 3
        table = torch.full((B, count + spare), -1, dtype=torch.int32)
        table[:, :count] = torch.randperm(pages)[: B * count].view(B, count)
        tensors = [in_pages(x, page, table, pages) for x in tensors]
    elif spare:
        tensors = [None if x is None else torch.cat([x, x[:, :, :5] * 0], 2) for x in tensors]
    width = v.shape[-1]
    k_codes, k_scale, v_codes, v_scale = tensors
    assert k_codes is not None
    assert v_codes is not None
    return Stored(k_codes, v_codes, k_scale, v_scale, table, page, kind, L, D, width)
