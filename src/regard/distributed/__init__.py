"""Attention over a sequence that several processes share, on torch.distributed.

A rank holds a shard of the tokens, described by a layout. `attention` takes shards and the mask of
the whole sequence.
"""

from .attention import attention
from .latent_attention import latent_attention
from .layouts import Layout, balanced, contiguous, next_tokens, positions, shard, striped, zigzag
from .linear_attention import linear_attention
from .plan import DistributedPlan, plan
from .sequence_parallel import SequenceParallel
from .unshard import unshard

__all__ = [
    "DistributedPlan", "Layout", "SequenceParallel", "attention", "balanced", "contiguous",
    "latent_attention", "linear_attention", "next_tokens", "plan", "positions", "shard", "striped",
    "unshard", "zigzag",
]  # fmt: skip
