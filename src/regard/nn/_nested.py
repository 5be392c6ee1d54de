"""Conversion of nested tensors (N, j, E), jagged or strided, to packed tokens with cu_seqlens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..packing import cu_seqlens


class PackedTokens(NamedTuple):
    tokens: Tensor  # (total, E)
    cu_seqlens: Tensor  # (N + 1,)
    layout: torch.layout

    def nested(self, tokens: Tensor) -> Tensor:
        """Splits `tokens` (total, ...) at `cu_seqlens` into a nested tensor of the same layout."""
        if self.layout is torch.jagged:
            return torch.nested.nested_tensor_from_jagged(tokens, self.cu_seqlens)
        sizes = self.cu_seqlens.diff().tolist()
        return torch.nested.as_nested_tensor(list(tokens.split(sizes)), layout=torch.strided)


def packed_tokens(name: str, x: Any, width: int) -> PackedTokens:
    """Packs a nested tensor (N, j, width). Raises TypeError or ValueError for any other input."""
    if not x.is_nested:
        raise TypeError(f"{name}: expected a nested tensor, like the others, got shape {tuple(x.shape)}")
    if x.dim() != 3:
        raise ValueError(f"{name}: expected a nested tensor (N, j, {width}), got {x.dim()} dims")
    if x.layout is torch.jagged:
        whole = x if x.lengths() is None else x.contiguous()
        packed = PackedTokens(whole.values(), whole.offsets(), x.layout)
    else:
        sequences = x.unbind()
        cumulative = cu_seqlens([len(sequence) for sequence in sequences]).to(x.device)
        packed = PackedTokens(torch.cat(sequences), cumulative, x.layout)
    got = packed.tokens.shape[-1]
    if got != width:
        raise ValueError(f"{name}: expected a nested tensor (N, j, {width}), got width {got}")
    return packed
