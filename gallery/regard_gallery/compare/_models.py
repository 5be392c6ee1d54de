"""A byte-level language model with one kind of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.cache import SlidingCache
from regard.masks import Causal, sliding
from regard.nn import Attention, Block, LatentAttention, LinearAttention, Stack, SwiGLU
from regard.positions import Rotary

from .._checks import count

ONE_HEAD = "one head"  # MHA with one head of full width, not in the table of `regard compare`
KV_HEADS = {"MHA": None, "GQA-4": 4, "MQA": 1, "window": None, ONE_HEAD: None}
KINDS = ("MHA", "GQA-4", "MQA", "MLA", "window", "linear")
Layer = Attention | LatentAttention | LinearAttention


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, which are the same for all kinds of attention.

    `window` is the number of keys in a window, including the key at the query's own position.
    """

    width: int = 256
    heads: int = 8
    layers: int = 4
    window: int = 64

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            count(name, size, 1)
        if self.heads % 4:
            raise ValueError(f"heads: expected a multiple of the 4 key heads of GQA-4, got {self.heads}")
        if self.width % (4 * self.heads):  # D / 2, the size of MLA's rotary keys, must be even
            raise ValueError(
                f"width: expected a multiple of 4 for each of {self.heads} heads, got {self.width}"
            )


class ByteModel(nn.Module):
    """Maps bytes (B, L) to logits of the next byte (B, L, 256)."""

    def __init__(self, kind: str, sizes: Sizes) -> None:
        super().__init__()
        self.kind, self.sizes = kind, sizes
        self.byte = nn.Embedding(256, sizes.width)
        blocks = [Block(layer(kind, sizes), SwiGLU(sizes.width)) for _ in range(sizes.layers)]
        self.stack = Stack(blocks, nn.LayerNorm(sizes.width))
        self.score = nn.Linear(sizes.width, 256)

    def forward(self, tokens: Tensor, caches: list[Any] | None = None) -> Tensor:
        scores: Tensor = self.score(self.stack(self.byte(tokens), caches=caches))
        return scores

    def new_caches(self, capacity: int) -> list[Any]:
        """Returns empty caches for one sample. With kind "window", they store only the window."""
        if self.kind != "window":
            return self.stack.new_caches(1, capacity)
        heads, D = self.sizes.heads, self.sizes.width // self.sizes.heads
        return [SlidingCache(1, heads, D, window=self.sizes.window) for _ in range(self.sizes.layers)]

    def cache_bytes(self, tokens: int) -> int:
        """Returns the bytes of the caches of all layers, for one sample of `tokens` tokens."""
        return sum(cache.nbytes for cache in self.new_caches(tokens))


def layer(kind: str, sizes: Sizes) -> Layer:
    """Returns an attention layer of this kind.

    MLA has DeepSeek's proportions: with D channels per head, latents have 4 D channels and rotary
    keys D / 2.
    """
    width, heads = sizes.width, 1 if kind == ONE_HEAD else sizes.heads
    D = width // heads
    if kind == "linear":
        return LinearAttention(width, heads)
    if kind == "MLA":
        return LatentAttention(
            width, heads, rank=4 * D, nope_dim=D, rope_dim=D // 2, mask=Causal(), bias=False
        )
    if kind not in KV_HEADS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    mask = sliding(sizes.window) if kind == "window" else Causal()
    return Attention(width, heads, kv_heads=KV_HEADS[kind], position=Rotary(D), mask=mask, bias=False)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
