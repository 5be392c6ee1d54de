"""Nested tensors (N, j, E), of both of PyTorch's layouts, as one packed row and its borders."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..packing import cu_seqlens


class Row(NamedTuple):
    tokens: Tensor  # (total, E)
    borders: Tensor  # (N + 1,)
    layout: torch.layout

    def nested(self, tokens: Tensor) -> Tensor:
        """Other tokens (total, ...) as a nested tensor with these borders and this layout."""
        if self.layout is torch.jagged:
            return torch.nested.nested_tensor_from_jagged(tokens, self.borders)
        sizes = self.borders.diff().tolist()
        return torch.nested.as_nested_tensor(list(tokens.split(sizes)), layout=torch.strided)


def row(name: str, x: Any) -> Row:
    """The row of a nested tensor (N, j, E)."""
    if not x.is_nested:
        raise TypeError(f"{name}: expected a nested tensor as the others are, got shape {tuple(x.shape)}")
    if x.dim() != 3:
        raise ValueError(f"{name}: expected a nested tensor (N, j, E), got {x.dim()} dims")
    if x.layout is torch.jagged:
        whole = x if x.lengths() is None else x.contiguous()
        return Row(whole.values(), whole.offsets(), x.layout)
    parts = x.unbind()
    return Row(torch.cat(parts), cu_seqlens([len(part) for part in parts]).to(x.device), x.layout)
