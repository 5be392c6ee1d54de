"""Padded batches: how many tokens of each sample are real."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tools.arguments import describe, holds_integers, readable, tensor_of


def checked_lengths(lengths: Tensor | None, x: Tensor, dim: int = 2) -> Tensor | None:
    """Checks the number of real tokens of each sample of x, whose tokens are in `dim`: int64 (B,).

    None means that all tokens are real.
    """
    if lengths is None:
        return None
    B, L = len(x), x.shape[dim]
    given = tensor_of("lengths", lengths)
    if not holds_integers(given) or given.shape != (B,):
        raise ValueError(f"lengths: expected integers (B = {B},), got {describe(given)}")
    given = given.to(x.device, torch.int64)
    if readable(given) and B:
        low, high = (int(n) for n in torch.aminmax(given))
        if not 0 <= low <= high <= L:
            raise ValueError(f"lengths: expected from 0 to L = {L}, got values from {low} to {high}")
    return given


def real_tokens(lengths: Tensor, x: Tensor) -> Tensor:
    """Marks the first n tokens of each sample of x (B, H, L, D): bool (B, 1, L, 1)."""
    places = torch.arange(x.shape[2], device=x.device)
    return (places < lengths.to(x.device)[:, None])[:, None, :, None]
