"""Modules whose tokens are shards of a sequence: the argument `parallel`.

`regard.distributed` is imported only by calls with the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._api.packed import packed_plan
from .._tools.arguments import describe
from ..positions import Positions

if TYPE_CHECKING:
    from ..distributed import SequenceParallel


def checked_parallel(parallel: Any, name: str, x: Tensor) -> SequenceParallel:
    """Returns the argument `parallel`. Checks that x (..., lengths[rank], channels) is a shard."""
    from ..distributed import SequenceParallel

    if not isinstance(parallel, SequenceParallel):
        raise TypeError(f"parallel: expected a distributed.SequenceParallel, got {describe(parallel)}")
    layout, rank = parallel.layouts[0], parallel.rank
    if x.dim() < 2 or x.shape[-2] != layout.lengths[rank]:
        expected = f"{layout.lengths[rank]} tokens, the shard of rank {rank} of {layout.L} tokens"
        raise ValueError(f"{name}: expected {expected} with parallel, got {describe(x)}")
    return parallel


def whole_like(x: Tensor, parallel: SequenceParallel) -> Tensor:
    """Returns a tensor of one element that is expanded to the shape of x for the whole sequence."""
    return x.new_empty(1).expand(*x.shape[:-2], parallel.layouts[0].L, x.shape[-1])


def shard_positions(positions: Positions, parallel: SequenceParallel) -> Tensor:
    """Returns the positions (..., lengths[rank]) of this rank's tokens.

    `positions` are those of the whole sequence: the first one, or integers (..., L).
    """
    if not isinstance(positions, Tensor):
        return parallel.positions() + positions
    L = parallel.layouts[0].L
    if positions.dim() < 1 or positions.shape[-1] != L:
        expected = f"an int or integers (..., L = {L}) of the whole sequence with parallel"
        raise ValueError(f"positions: expected {expected}, got {describe(positions)}")
    return parallel.shard(positions, -1)


def attend_shards(
    parallel: SequenceParallel, attend: Callable[..., Any], shards: tuple[Tensor, ...],
    cu_seqlens: tuple[Tensor | None, Tensor | None], options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Calls a method of `parallel` that computes attention of shards over the whole sequence.

    The shards are q, k, v (..., H, lengths[rank], D), or q and latents (..., lengths[rank], D).
    `cu_seqlens` are those of the whole packed rows of x and of the context.
    """
    (cu_q, cu_k), device = cu_seqlens, shards[0].device
    if cu_q is not None:
        options = options | _packed_row(parallel, cu_q, cu_q if cu_k is None else cu_k, options, device)
    return on_shards(attend, shards, options)


def on_shards(attend: Callable[..., Any], shards: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Calls a function of batched shards, the first of which is q (B, H, lengths[rank], D) or unbatched."""
    if shards[0].dim() == 4:
        out: Tensor = attend(*shards, **options)
        return out
    out = attend(*(x.unsqueeze(0) for x in shards), **options)
    return out.squeeze(0)


def _packed_row(
    parallel: SequenceParallel, cu_q: Tensor, cu_k: Tensor, options: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Returns the mask and the offset of one call over all packed sequences."""
    options = {"offset": None, "bias": None} | options
    plan = packed_plan(cu_q, cu_k, options, device)
    names = ("cu_seqlens", "context_cu_seqlens")
    for name, layout, sizes in zip(names, parallel.layouts, (plan.sizes_q, plan.sizes_k), strict=True):
        if sum(sizes) != layout.L:
            raise ValueError(f"{name}: expected the last entry {layout.L}, the layout's L, got {sum(sizes)}")
    if plan.row is None:
        raise ValueError(
            "cu_seqlens: expected, with parallel, a mask and a bias that depend on distances alone (Causal, "
            "Window, Dilated), and one difference of the lengths of context and queries; got mask "
            f"{options['mask']!r}, bias {describe(options['bias'])}"
        )
    return {"mask": plan.row, "offset": plan.shift}
