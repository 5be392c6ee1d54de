"""The n x n weights that `MultiheadAttention` returns when it is asked for them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import Arguments


def dense_weights(q: Tensor, k: Tensor, given: Arguments) -> Tensor:
    """(B, H, Lq, Lk) for q (B, H, Lq, D) and k (B, H, Lk, D): softmax of the scores, as PyTorch computes it.

    In q's dtype, float32 inside for 16 bits; `regard.weights` is in float64 and takes about three times as
    long. A row that sees nothing is zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    s: Tensor = (q.to(wide) * q.shape[-1] ** -0.5) @ k.to(wide).mT
    if given.bias is not None:
        s = s + given.bias
    if given.mask is not None:
        keep = given.mask.to_dense(q.shape[2], k.shape[2], given.offset, q.shape[1], q.device)
        s = s.masked_fill(~keep, -torch.inf)
    if given.bias is None and given.mask is None:
        return s.softmax(-1).to(q.dtype)
    nothing = s.amax(-1, keepdim=True) == -torch.inf
    return s.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0).to(q.dtype)
