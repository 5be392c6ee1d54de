"""Modules: attention layers with projections, feed-forward layers, and transformer blocks."""

from .._api.projection import Linear
from ._options import CacheLike, Memory
from .additive import AdditiveAttention
from .attention import Attention
from .bigbird import BigBirdAttention, block_table
from .blocks import Block, DecoderBlock, EncoderBlock, EncoderDecoder, Stack
from .feedforward import FeedForward, GatedFeedForward, SwiGLU
from .graph import Graph, GraphAttention
from .latent import LatentAttention
from .linear import LinearAttention
from .linformer import LinformerAttention, LinformerProjection
from .longformer import LongformerAttention
from .multihead import MultiheadAttention
from .named import (
    CausalSelfAttention,
    CrossAttention,
    GroupedQueryAttention,
    MultiQueryAttention,
    ScaledDotProductAttention,
    SelfAttention,
    missing as _missing,
)
from .norms import PostNorm, PreNorm
from .performer import PerformerAttention

__all__ = [
    "AdditiveAttention", "Attention", "BigBirdAttention", "Block", "CacheLike", "CausalSelfAttention",
    "CrossAttention", "DecoderBlock", "EncoderBlock", "EncoderDecoder", "FeedForward", "GatedFeedForward",
    "Graph", "GraphAttention", "GroupedQueryAttention", "LatentAttention", "Linear", "LinearAttention",
    "LinformerAttention", "LinformerProjection", "LongformerAttention", "Memory", "MultiQueryAttention",
    "MultiheadAttention", "PerformerAttention", "PostNorm", "PreNorm", "ScaledDotProductAttention",
    "SelfAttention", "Stack", "SwiGLU", "block_table",
]  # fmt: skip


def __getattr__(name: str) -> object:
    raise _missing(name)
