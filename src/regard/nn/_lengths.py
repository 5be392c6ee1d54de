"""Padded batches: the `lengths` option of the modules."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tools.arguments import describe, holds_integers, readable, tensor_of


def checked_lengths(lengths: Tensor | None, x: Tensor, dim: int = 2) -> Tensor | None:
    """Returns `lengths` as int64 (B,) on x's device, or None if `lengths` is None.

    `dim` is the dim of the tokens in x. Raises ValueError for a length below 0 or above
    x.shape[dim].
    """
    if lengths is None:
        return None
    B, L = len(x), x.shape[dim]
    checked = tensor_of("lengths", lengths)
    if not holds_integers(checked) or checked.shape != (B,):
        raise ValueError(f"lengths: expected integers (B = {B},), got {describe(checked)}")
    checked = checked.to(x.device, torch.int64)
    if readable(checked) and B:
        low, high = (int(n) for n in torch.aminmax(checked))
        if not 0 <= low <= high <= L:
            raise ValueError(f"lengths: expected from 0 to L = {L}, got values from {low} to {high}")
    return checked


def real_tokens(lengths: Tensor, x: Tensor) -> Tensor:
    """Returns a bool mask (B, 1, L, 1) that is True for the real tokens of x (B, H, L, D)."""
    index = torch.arange(x.shape[2], device=x.device)
    return (index < lengths.to(x.device)[:, None])[:, None, :, None]
