"""The masks of `torch.nn.MultiheadAttention`, checked and turned into the arguments of `regard.attention`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._tools.arguments import describe, readable
from ..masks import Arguments, Causal, Mask, Not, Prefix, from_mha


class Sizes(NamedTuple):
    B: int
    heads: int
    Lq: int
    Lk: int  # without the extra keys
    extra: int  # keys after the last that all may attend to
    dtype: torch.dtype


EVERYTHING = Arguments()


def arguments(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, sizes: Sizes
) -> Arguments:
    """Masks of PyTorch's polarity: bool True = may not attend, float = added."""
    if attn_mask is None and key_padding_mask is None:
        return Arguments(_causal(sizes), None, 0) if is_causal else EVERYTHING
    if attn_mask is not None:
        attn_mask = _four_dims(_checked_dtype("attn_mask", attn_mask, sizes), sizes)
        # Beside the causal mask the other half is not read, and reading all of it would cost more.
        attn_mask = _extended(attn_mask if is_causal or attn_mask.ndim > 2 else _as_bool(attn_mask), sizes)
    if key_padding_mask is not None:
        checked = _checked_padding(_checked_dtype("key_padding_mask", key_padding_mask, sizes), sizes)
        key_padding_mask = _extended(_as_bool(checked), sizes)
    found = from_mha(attn_mask, key_padding_mask, heads=sizes.heads)
    if not is_causal:
        return found
    causal = _causal(sizes)
    return Arguments(causal if found.mask is None else causal & found.mask, found.bias, 0)


def _causal(sizes: Sizes) -> Mask:
    # In words that compilers follow: they know | and & of masks, but not ~.
    return Causal() | Not(Prefix(sizes.Lk)) if sizes.extra else Causal()


def _extended(mask: Tensor, sizes: Sizes) -> Tensor:
    """With columns for the extra keys, which all may attend to."""
    return F.pad(mask, (0, sizes.extra)) if sizes.extra else mask


def _checked_dtype(name: str, mask: Tensor, sizes: Sizes) -> Tensor:
    known = (torch.bool, torch.float32, sizes.dtype)
    if not isinstance(mask, Tensor) or (mask.dtype not in known and not _is_cast(mask)):
        raise TypeError(
            f"{name}: expected a bool tensor (True = may not attend), or floats to be added, of the tokens' "
            f"dtype {sizes.dtype} or float32, got {describe(mask)}"
        )
    return mask


def _is_cast(mask: Tensor) -> bool:
    return mask.is_floating_point() and torch.is_autocast_enabled(mask.device.type)


def _four_dims(attn_mask: Tensor, sizes: Sizes) -> Tensor:
    """(Lq, Lk), or (B or 1, heads or 1, Lq, Lk)."""
    B, H, Lq, Lk = sizes[:4]
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
    """A mask of 0 and -inf as one of bools, which lets the kernel leave out what is hidden.

    PyTorch's layers make floats of every mask that they are given.
    """
    if not mask.is_floating_point() or mask.requires_grad or not readable(mask):
        return mask
    ignored = mask
    for part in (mask[:1], mask):  # the first row tells most others apart
        ignored = part == -torch.inf
        if not torch.equal(ignored, part != 0):
            return mask
    return ignored
