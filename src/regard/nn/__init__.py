"""Modules: attention with its projections, and the blocks that models are made of."""

from ._call import Cache as Cache
from ._call import Memory as Memory
from .attention import Attention as Attention
from .attention import CrossAttention as CrossAttention
from .attention import GroupedQueryAttention as GroupedQueryAttention
from .attention import MultiQueryAttention as MultiQueryAttention
from .attention import SelfAttention as SelfAttention
from .bigbird import BigBirdAttention as BigBirdAttention
from .bigbird import block_table as block_table
from .blocks import Block as Block
from .blocks import DecoderBlock as DecoderBlock
from .blocks import EncoderBlock as EncoderBlock
from .blocks import EncoderDecoder as EncoderDecoder
from .blocks import Stack as Stack
from .feedforward import FeedForward as FeedForward
from .feedforward import GatedFeedForward as GatedFeedForward
from .feedforward import SwiGLU as SwiGLU
from .latent import LatentAttention as LatentAttention
from .linear import LinearAttention as LinearAttention
from .linformer import LinformerAttention as LinformerAttention
from .linformer import LinformerProjection as LinformerProjection
from .longformer import LongformerAttention as LongformerAttention
from .multihead import MultiheadAttention as MultiheadAttention
from .norms import PostNorm as PostNorm
from .norms import PreNorm as PreNorm
from .performer import PerformerAttention as PerformerAttention
