"""The masks of `torch.nn.MultiheadAttention`, checked and turned into the arguments of `regard.attention`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._arguments import describe, readable
from ..masks import Arguments, Causal, Mask, Prefix, from_mha


class Sizes(NamedTuple):
    B: int
    heads: int
    Lq: int
    Lk: int  # without the extra keys
    extra: int  # keys after the last that all may attend to


def arguments(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, sizes: Sizes
) -> Arguments:
    """Masks of PyTorch's polarity: bool True = may not attend, float = added."""
    pad = (0, sizes.extra)
    if attn_mask is not None:
        attn_mask = F.pad(_four_dims(attn_mask, sizes), pad)
    if key_padding_mask is not None:
        key_padding_mask = F.pad(_as_bool(_checked_padding(key_padding_mask, sizes)), pad)
    found = from_mha(attn_mask, key_padding_mask, heads=sizes.heads)
    if not is_causal:
        return found
    causal: Mask = Causal() | ~Prefix(sizes.Lk) if sizes.extra else Causal()
    return Arguments(causal if found.mask is None else causal & found.mask, found.bias, 0)


def _four_dims(attn_mask: Tensor, sizes: Sizes) -> Tensor:
    """(Lq, Lk), or (B or 1, heads or 1, Lq, Lk)."""
    B, H, Lq, Lk, _ = sizes
    shape = tuple(attn_mask.shape)
    if shape == (Lq, Lk):
        return attn_mask
    if shape == (B * H, Lq, Lk):
        return attn_mask.view(B, H, Lq, Lk)
    if shape == (B, Lq, Lk):
        return attn_mask.unsqueeze(1)
    if len(shape) == 4 and shape[0] in (1, B) and shape[1] in (1, H) and shape[2:] == (Lq, Lk):
        return attn_mask
    raise ValueError(
        f"attn_mask: expected (Lq, Lk) = {(Lq, Lk)}, (B * heads, Lq, Lk) = {(B * H, Lq, Lk)}, "
        f"(B, Lq, Lk) or (B, heads, Lq, Lk) with B = {B}, got {describe(attn_mask)}"
    )


def _checked_padding(mask: Tensor, sizes: Sizes) -> Tensor:
    if tuple(mask.shape) != (sizes.B, sizes.Lk):
        raise ValueError(
            f"key_padding_mask: expected one row of keys for each sample, (B, Lk) = {(sizes.B, sizes.Lk)}, "
            f"got {describe(mask)}"
        )
    return mask


def _as_bool(mask: Tensor) -> Tensor:
    """PyTorch's layers make 0 and -inf of a bool mask; as a bool it costs nothing for each query."""
    if not mask.is_floating_point() or mask.requires_grad or not readable(mask):
        return mask
    ignored = mask == -torch.inf
    return ignored if bool((ignored | (mask == 0)).all()) else mask
