"""Nested tensors (N, j, E), of both of PyTorch's layouts, as packed tokens and their cu_seqlens."""

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
        """Returns other tokens (total, ...) as a nested tensor with these lengths and this layout."""
        if self.layout is torch.jagged:
            return torch.nested.nested_tensor_from_jagged(tokens, self.cu_seqlens)
        sizes = self.cu_seqlens.diff().tolist()
        return torch.nested.as_nested_tensor(list(tokens.split(sizes)), layout=torch.strided)


def packed_tokens(name: str, x: Any, width: int) -> PackedTokens:
    """Packs a nested tensor (N, j, width)."""
    if not x.is_nested:
        raise TypeError(f"{name}: expected a nested tensor as the others are, got shape {tuple(x.shape)}")
    if x.dim() != 3:
        raise ValueError(f"{name}: expected a nested tensor (N, j, {width}), got {x.dim()} dims")
    if x.layout is torch.jagged:
        whole = x if x.lengths() is None else x.contiguous()
        packed = PackedTokens(whole.values(), whole.offsets(), x.layout)
    else:
        parts = x.unbind()
        lengths = cu_seqlens([len(part) for part in parts]).to(x.device)
        packed = PackedTokens(torch.cat(parts), lengths, x.layout)
    if packed.tokens.shape[-1] != width:
        found = packed.tokens.shape[-1]
        raise ValueError(f"{name}: expected a nested tensor (N, j, {width}), got width {found}")
    return packed
