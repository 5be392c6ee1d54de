"""Modules: attention layers with projections, feed-forward layers, and transformer blocks."""

from ._options import CacheLike as CacheLike, Memory as Memory
from .attention import (
    Attention as Attention,
    CrossAttention as CrossAttention,
    GroupedQueryAttention as GroupedQueryAttention,
    MultiQueryAttention as MultiQueryAttention,
    SelfAttention as SelfAttention,
)
from .bigbird import BigBirdAttention as BigBirdAttention, block_table as block_table
from .blocks import (
    Block as Block,
    DecoderBlock as DecoderBlock,
    EncoderBlock as EncoderBlock,
    EncoderDecoder as EncoderDecoder,
    Stack as Stack,
)
from .feedforward import FeedForward as FeedForward, GatedFeedForward as GatedFeedForward, SwiGLU as SwiGLU
from .graph import Graph as Graph, GraphAttention as GraphAttention
from .latent import LatentAttention as LatentAttention
from .linear import LinearAttention as LinearAttention
from .linformer import LinformerAttention as LinformerAttention, LinformerProjection as LinformerProjection
from .longformer import LongformerAttention as LongformerAttention
from .multihead import MultiheadAttention as MultiheadAttention
from .norms import PostNorm as PostNorm, PreNorm as PreNorm
from .performer import PerformerAttention as PerformerAttention
