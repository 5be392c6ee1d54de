"""Conversion of `torch.nn.MultiheadAttention`'s masks to arguments of `regard.attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._tools.arguments import describe, readable
from ..masks import Arguments, Causal, Dense, Mask, Not, Prefix, from_mha, to_hf_4d
from ..masks._both import both
from ._padding import declared_padding

UNMASKED = Arguments()
TorchMask = Tensor | Mask | None


def arguments(
    attn_mask: TorchMask, padding_mask: TorchMask, is_causal: bool, q: Tensor, Lk: int, extra: int
) -> Arguments:
    """Converts PyTorch's masks to the mask, bias and offset of `regard.attention`.

    In PyTorch's masks, True means "may not attend", and floats are added to the scores. A `Mask`
    keeps its meaning. q is (B, H, Lq, D). There are Lk + extra keys. All queries may attend to the
    last `extra` of them.
    """
    if isinstance(attn_mask, Mask) or isinstance(padding_mask, Mask):
        masks, (attn_mask, padding_mask) = _separated(attn_mask, padding_mask)
        tensors = arguments(attn_mask, padding_mask, False, q, Lk, extra)
        return Arguments(both(tensors.mask, _over_all_keys(masks, is_causal, q, Lk, extra)), tensors.bias)
    if attn_mask is None and padding_mask is None:
        return Arguments(_causal(Lk, extra), None, 0) if is_causal else UNMASKED
    if attn_mask is not None:
        attn_mask = _four_dims(_checked_dtype("attn_mask", attn_mask, q), q, Lk)
        # With is_causal, `_as_bool` is not worth it: it reads the whole mask, attention only half of it.
        attn_mask = _extended(attn_mask if is_causal or attn_mask.ndim > 2 else _as_bool(attn_mask), extra)
    if padding_mask is not None:
        _checked_dtype("key_padding_mask", padding_mask, q)
        if padding_mask.shape != (len(q), Lk):
            expected = f"one row of keys for each sample, (B, Lk) = {(len(q), Lk)}"
            raise ValueError(f"key_padding_mask: expected {expected}, got {describe(padding_mask)}")
        padding_mask = _extended(_as_bool(padding_mask), extra)
    converted = from_mha(attn_mask, padding_mask, heads=q.shape[1])
    return Arguments(both(_causal(Lk, extra), converted.mask), converted.bias, 0) if is_causal else converted


def padding_of_keys(keys: Tensor, padding_mask: TorchMask, attn_mask: TorchMask) -> Tensor | None:
    """Returns which tokens of the keys (B, Lk, E) are padding, bool (B, Lk), or None.

    PyTorch's `key_padding_mask` declares padding with True or -inf, a `Mask` with `Lengths`.
    """
    padding = declared_padding(keys, None, padding_mask, attn_mask)
    if isinstance(padding_mask, Tensor) and padding_mask.shape == keys.shape[:2]:
        ignored = padding_mask if padding_mask.dtype == torch.bool else padding_mask == -torch.inf
        padding = ignored if padding is None else padding | ignored
    return None if padding is None else padding.expand(keys.shape[:2])


def _separated(*given: TorchMask) -> tuple[Mask | None, list[Tensor | None]]:
    """Separates masks from tensors.

    Returns the conjunction of all Mask arguments, and the list of arguments with each Mask replaced
    by None.
    """
    masks = (x if isinstance(x, Mask) else None for x in given)
    return both(*masks), [None if isinstance(x, Mask) else x for x in given]


def _over_all_keys(mask: Mask | None, is_causal: bool, q: Tensor, Lk: int, extra: int) -> Mask | None:
    """Checks a Mask over Lk keys, applies `is_causal`, and allows the `extra` keys after them."""
    (B, H, Lq), causal = q.shape[:3], Causal()
    assert mask is not None
    mask.check_shapes((B,), H, Lq, Lk)
    if not torch.compiler.is_compiling():
        mask.check_values((B,), H, Lq, Lk)
    if is_causal:  # is_causal is aligned to the top left, a Mask to the bottom right
        mask = mask & (causal if Lq == Lk else Dense.borrow(causal.to_dense(Lq, Lk, 0, device=q.device)))
    if not extra:
        return mask
    return Dense.borrow(F.pad(to_hf_4d(mask.to(q.device), Lq, Lk, heads=H), (0, extra), value=True))


def _causal(Lk: int, extra: int) -> Mask:
    # Not(...) instead of ~: torch.compile traces | and & of masks, but not ~.
    return Causal() | Not(Prefix(Lk)) if extra else Causal()


def _extended(mask: Tensor, extra: int) -> Tensor:
    """Appends zero (False) columns for the extra keys: (..., Lk) -> (..., Lk + extra)."""
    return F.pad(mask, (0, extra)) if extra else mask


def _checked_dtype(name: str, mask: Tensor, q: Tensor) -> Tensor:
    known = (torch.bool, torch.float32, q.dtype)
    if not isinstance(mask, Tensor) or (mask.dtype not in known and not _is_cast(mask)):
        raise TypeError(
            f"{name}: expected a bool tensor (True = may not attend), a tensor to add to the scores, of "
            f"dtype {q.dtype} or float32, or a Mask, got {describe(mask)}"
        )
    return mask


def _is_cast(mask: Tensor) -> bool:
    return mask.is_floating_point() and torch.is_autocast_enabled(mask.device.type)


def _four_dims(attn_mask: Tensor, q: Tensor, Lk: int) -> Tensor:
    """Reshapes the mask to (B or 1, H or 1, Lq, Lk). A mask (Lq, Lk) is returned unchanged."""
    (B, H, Lq), shape = q.shape[:3], tuple(attn_mask.shape)
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


def _as_bool(mask: Tensor) -> Tensor:
    """Converts a float mask whose entries are all 0 or -inf to bool (True = may not attend).

    Returns any other mask unchanged. With a bool mask, the kernel skips masked keys. Such float
    masks are common, because PyTorch's transformer layers convert every bool mask to float.
    """
    if not mask.is_floating_point() or mask.requires_grad or not readable(mask):
        return mask
    ignored = mask
    for rows in (mask[:1], mask):  # early exit: most masks with other entries have one in row 0
        ignored = rows == -torch.inf
        if not torch.equal(ignored, rows != 0):
            return mask
    return ignored
