"""Attention layers as specs: sizes from which parameters, products, attention calls and cache rows follow.

Names and defaults are those of `regard.nn`. A spec knows nothing of a batch; `Work` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from .._tools.arguments import count, describe
from ..masks import Mask, streaming
from ..masks._both import both
from ..nn._sizes import sizes
from ._call import CallSpec


@dataclass(frozen=True)
class Work:
    """B samples of L new tokens each, after `past` tokens that a cache holds."""

    L: int
    past: int = 0
    B: int = 1
    dtype: torch.dtype = torch.float32
    mask: Mask | None = None  # narrows the layer's own: packed documents, padding

    @property
    def Lk(self) -> int:
        return self.L + self.past

    @property
    def rows(self) -> int:
        return self.B * self.L

    def narrowed(self, own: Mask | None) -> Mask | None:
        """Returns the pairs that both masks allow."""
        return both(own, self.mask)


class Product(NamedTuple):
    """Matrix products (m, k) @ (k, n), `times` of them."""

    name: str
    m: int
    k: int
    n: int
    times: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.times * self.m * self.k * self.n

    @property
    def read(self) -> int:
        """Values: both factors once."""
        return self.times * self.k * (self.m + self.n)

    @property
    def written(self) -> int:
        return self.times * self.m * self.n


class KeptRows(NamedTuple):
    """What a cache keeps of a token: `heads` rows of `width` values."""

    heads: int
    width: int


class PartSpec:
    """A part of a model that computes something of tokens."""

    d_model: int

    def products(self, work: Work) -> list[Product]:
        """Returns the matrix products besides those of `calls`."""
        raise NotImplementedError

    def calls(self, work: Work) -> list[CallSpec]:
        """Returns the calls of `regard.attention`."""
        return []

    def inputs(self, work: Work) -> int:
        """Counts the values kept for the backward pass of the products: x, what the calls do not keep."""
        return work.rows * self.d_model

    @property
    def weights(self) -> int:
        """Numbers in the matrices, where every product is one of tokens with a matrix of the part."""
        return sum(product.times * product.k * product.n for product in self.products(Work(1)))


@dataclass(frozen=True)
class LayerSpec(PartSpec):
    """Base of all attention layers."""

    d_model: int
    heads: int
    refused: ClassVar[tuple[str, ...]] = ()  # fields of `Work` that the layer has no form of

    def __post_init__(self) -> None:
        count("d_model", self.d_model, 1)
        count("heads", self.heads, 1)

    @property
    def parameters(self) -> int:
        raise NotImplementedError

    def check(self, work: Work) -> None:
        """Raises ValueError for work that the layer cannot do."""
        for name in self.refused:
            if (given := getattr(work, name)) not in (None, 0):
                raise ValueError(f"{name}: expected none for {type(self).__name__}, got {describe(given)}")

    @property
    def kept(self) -> tuple[KeptRows, ...]:
        """What a cache keeps of each token; () where the cache does not grow, or there is none."""
        return ()

    @property
    def reads_cache(self) -> bool:
        """Whether calls of attention read a cache in place."""
        return False

    @property
    def state(self) -> int:
        """Values that a cache of a sample holds whatever its length."""
        return 0

    @property
    def most_kept(self) -> int | None:
        """Tokens beyond which a cache need not grow; None: it must."""
        return None

    @property
    def kv_values(self) -> int:
        """Values for each token in a cache."""
        return sum(rows.heads * rows.width for rows in self.kept)


@dataclass(frozen=True)
class GroupedSpec(LayerSpec):
    """Query heads in groups that share a key head."""

    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        _ = self.sizes  # checked there

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hkv, D, Dv"""
        return sizes(self.d_model, self.heads, self.kv_heads, self.head_dim, self.value_dim)[2:]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of all queries, of all keys and values, and of the heads' joined results."""
        Hkv, D, Dv = self.sizes
        return self.heads * D, Hkv * (D + Dv), self.heads * Dv


@dataclass(frozen=True)
class AttentionSpec(GroupedSpec):
    """Multi-head, grouped-query (kv_heads) and multi-query (1) attention, as in `nn.Attention`.

    Args:
        window, sinks: each token sees the last `window` tokens, its own included, and the first `sinks`.
        mask: of every call, such as `masks.Causal()`.
        bias, out_bias, gate: as in `nn.Attention`.
        kv_model: the width of another context, of `Work.Lk` tokens.
        others: parameters that are in no product: of norms, sinks, tables of positions.
    """

    kv_model: int | None = None
    bias: bool = False
    out_bias: bool = False
    gate: bool = False
    mask: Mask | None = None
    window: int | None = None
    sinks: int = 0
    others: int = 0

    @property
    def parameters(self) -> int:
        q, kv, _ = self.widths
        return self.weights + self.bias * (q + kv) + self.out_bias * self.d_model + self.others

    def products(self, work: Work) -> list[Product]:
        d, (q, kv, out) = self.d_model, self.widths
        made = [Product("q, k, v", work.rows, d, q + kv)]
        if self.kv_model is not None:
            made = [Product("q", work.rows, d, q), Product("k, v", work.B * work.Lk, self.kv_model, kv)]
        gate = [Product("gate", work.rows, d, out)] * self.gate
        return [*made, *gate, Product("out", work.rows, out, d)]

    def calls(self, work: Work) -> list[CallSpec]:
        Hkv, D, Dv = self.sizes
        mask = work.narrowed(self.pattern)
        return [CallSpec(work.B, self.heads, work.L, D, Hkv, work.Lk, Dv, work.dtype, mask)]

    @property
    def pattern(self) -> Mask | None:
        """The mask with the window."""
        return self.mask if self.window is None else both(streaming(self.window, self.sinks), self.mask)

    @property
    def kept(self) -> tuple[KeptRows, ...]:
        Hkv, D, Dv = self.sizes
        return KeptRows(Hkv, D), KeptRows(Hkv, Dv)

    @property
    def reads_cache(self) -> bool:
        return True

    @property
    def most_kept(self) -> int | None:
        return None if self.window is None else self.window + self.sinks


@dataclass(frozen=True)
class LatentSpec(LayerSpec):
    """Multi-head latent attention, as in `nn.LatentAttention`.

    Args:
        absorbed: attend the latents themselves, or (False) expand keys and values of all heads before.
        normed: whether compressed vectors have an RMS norm.
    """

    rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    q_rank: int | None = None
    bias: bool = False
    out_bias: bool = False
    normed: bool = True
    absorbed: bool = False
    mask: Mask | None = None

    @property
    def q_width(self) -> int:
        """Channels of all queries."""
        return self.heads * (self.nope_dim + self.rope_dim)

    @property
    def parameters(self) -> int:
        first = (self.q_width if self.q_rank is None else self.q_rank) + self.rank + self.rope_dim
        norms = self.normed * (self.rank + (self.q_rank or 0))
        return self.weights + norms + self.bias * first + self.out_bias * self.d_model

    def products(self, work: Work) -> list[Product]:
        d, rows, H, nope, Dv = self.d_model, work.rows, self.heads, self.nope_dim, self.value_dim
        q = [Product("q", rows, d, self.q_width)]
        if self.q_rank is not None:
            q = [Product("q, down", rows, d, self.q_rank), Product("q, up", rows, self.q_rank, self.q_width)]
        # Keys and values are expanded anew for all tokens, those of the cache too.
        way = [Product("k, v, up", work.B * work.Lk, self.rank, H * (nope + Dv))]
        if self.absorbed:
            way = [
                Product("q into the latent", rows, nope, self.rank, H),
                Product("v from the latent", rows, self.rank, Dv, H),
            ]
        latent = Product("latent", rows, d, self.rank + self.rope_dim)
        return [*q, latent, *way, Product("out", rows, H * Dv, d)]

    def calls(self, work: Work) -> list[CallSpec]:
        H, D, Hkv, Dv = self.heads, self.nope_dim + self.rope_dim, self.heads, self.value_dim
        if self.absorbed:
            D, Hkv, Dv = self.rank + self.rope_dim, 1, self.rank
        mask = work.narrowed(self.mask)
        return [CallSpec(work.B, H, work.L, D, Hkv, work.Lk, Dv, work.dtype, mask, shared=self.absorbed)]

    def inputs(self, work: Work) -> int:
        """x, compressed vectors, what `kv_up` made besides v (or queries before W_uk), the joined result."""
        way = self.q_width if self.absorbed else self.rank + self.heads * self.nope_dim
        return work.rows * (self.d_model + (self.q_rank or 0) + way + self.heads * self.value_dim)

    @property
    def kept(self) -> tuple[KeptRows, ...]:
        return (KeptRows(1, self.rank + self.rope_dim),)

    @property
    def reads_cache(self) -> bool:
        return self.absorbed
