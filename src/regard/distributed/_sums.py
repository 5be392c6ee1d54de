"""Sums over the ranks of a group, with gradients of every order.

Both functions are linear, and each is the gradient of the other. Which one a caller needs depends
on the loss: `summed` if all ranks compute the same loss from the sum, and `replicated` of the sum
if the loss is the sum of the ranks' losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .._tools.watching import uncompiled
from ._group import Group, named


@uncompiled
def summed(group: Group, x: Tensor) -> Tensor:
    """Returns the sum of the ranks' tensors x, bitwise the same on all ranks."""
    out: Tensor = Sum.apply(group, x)  # type: ignore[no-untyped-call]
    return out


@uncompiled
def replicated(group: Group, x: Tensor) -> Tensor:
    """Returns x, which all ranks have. Its gradient is the sum of the ranks' gradients."""
    out: Tensor = Replicate.apply(group, x) if x.requires_grad else x  # type: ignore[no-untyped-call]
    return out


class Sum(Function):
    """Maps the ranks' addends to their sum. Its gradient is that of each addend."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        if group.size > 1:
            with named(group, "the other ranks' terms of a sum"):
                dist.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, replicated(ctx.group, grad)


class Replicate(Function):
    """The identity, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, summed(ctx.group, grad)
