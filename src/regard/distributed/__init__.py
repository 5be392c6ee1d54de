"""Attention over a sequence that several processes share, on torch.distributed.

A rank holds a shard of the tokens, described by a layout. `attention` takes shards and the mask of
the whole sequence.
"""

from typing import TYPE_CHECKING, Any

from ._optimizers import clip_grad_norm_, whole_states
from .attention import attention
from .latent_attention import latent_attention
from .layouts import Layout, balanced, contiguous, next_tokens, positions, shard, striped, zigzag
from .linear_attention import linear_attention
from .plan import DistributedPlan, plan
from .sequence_parallel import SequenceParallel
from .unshard import unshard

if TYPE_CHECKING:
    from .head_parallel import HeadParallel

__all__ = [
    "DistributedPlan", "HeadParallel", "Layout", "SequenceParallel", "attention", "balanced",
    "clip_grad_norm_", "contiguous", "latent_attention", "linear_attention", "next_tokens", "plan",
    "positions", "shard", "striped", "unshard", "whole_states", "zigzag",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports `HeadParallel` on first use, because PyTorch's parallel styles import SymPy."""
    if name == "HeadParallel":
        from .head_parallel import HeadParallel

        return HeadParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
