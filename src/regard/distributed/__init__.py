"""Attention over a sequence that several processes share, on torch.distributed.

A rank holds a shard of the tokens, described by a layout. `attention` takes shards and the mask of
the whole sequence.
"""

from ._optimizers import clip_grad_norm_, whole_states
from .attention import attention
from .head_parallel import HeadParallel
from .latent_attention import latent_attention
from .layouts import Layout, balanced, contiguous, next_tokens, positions, shard, striped, zigzag
from .linear_attention import linear_attention
from .plan import DistributedPlan, plan
from .sequence_parallel import SequenceParallel
from .unshard import unshard

__all__ = [
    "DistributedPlan", "HeadParallel", "Layout", "SequenceParallel", "attention", "balanced",
    "clip_grad_norm_", "contiguous", "latent_attention", "linear_attention", "next_tokens", "plan",
    "positions", "shard", "striped", "unshard", "whole_states", "zigzag",
]  # fmt: skip
