"""NaN and Inf in padding, kept away from the gradients of a module's weights."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._tools.arguments import tensor_of
from ..masks import And, Documents, Lengths
from ._parallel import whole_like

if TYPE_CHECKING:
    from ..distributed import SequenceParallel


def finite_padding(
    x: Tensor, lengths: Any = None, *masks: Any, parallel: SequenceParallel | None = None
) -> Tensor:
    """Returns x (..., L, d_model) with zeros in tokens of the padding that have NaN or Inf.

    The gradient of a projection's weight is x^T g. In padding, g is 0, but 0 * NaN is NaN. All other
    tokens stay as they are. Padding is what `lengths` (...) and the masks declare for keys x: tokens
    from `Lengths` on, and tokens whose id in `Documents` is negative. With `parallel`, x is a shard
    and the padding that of the whole sequence.
    """
    padding = declared_padding(x if parallel is None else whole_like(x, parallel), lengths, *masks)
    if padding is None:
        return x
    return finite_where(padding if parallel is None else parallel.shard(padding, -1), x)


def declared_padding(x: Tensor, lengths: Any = None, *masks: Any) -> Tensor | None:
    """Returns which tokens of x `lengths` and the masks declare as padding, bool (..., L), or None."""
    declared = [] if lengths is None else _from(tensor_of("lengths", lengths), x)
    for mask in masks:
        declared += _masked_padding(x, mask)
    return functools.reduce(operator.or_, declared) if declared else None


def finite_where(padding: Tensor, x: Tensor) -> Tensor:
    """Returns x (..., d_model) with zeros in the tokens of `padding` (...) that have NaN or Inf."""
    is_finite = x.detach().abs().amax(-1).isfinite()  # three times as fast as x.isfinite()
    return x.masked_fill((padding & ~is_finite).unsqueeze(-1), 0)


def _masked_padding(x: Tensor, mask: Any) -> list[Tensor]:
    """Returns bool tensors (..., L): the keys that a mask declares as padding."""
    declared = []
    for part in mask.masks if isinstance(mask, And) else (mask,):
        if isinstance(part, Lengths):
            declared += _from(part.n, x)
        elif isinstance(part, Documents):
            ids = part.q_ids if part.k_ids is None else part.k_ids
            declared += [ids.to(x.device) < 0] if ids.shape in (x.shape[-2:-1], x.shape[:-1]) else []
    return declared


def _from(n: Tensor, x: Tensor) -> list[Tensor]:
    """Returns [which tokens of x (..., L, d_model) are at index n or later].

    The list is empty if n has a wrong shape, for which the attention call raises.
    """
    if n.shape not in ((), (1,), x.shape[:-2]):
        return []
    return [torch.arange(x.shape[-2], device=x.device) >= n.to(x.device).unsqueeze(-1)]
