"""Attention layers as numbers: their parameters, their products, their calls of attention, what they cache.

Names and defaults are those of `regard.nn`. A layer knows nothing of a batch; `Work` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._tools.arguments import count, describe
from ..masks import Mask, streaming
from ..nn._sizes import sizes
from ._call import Call


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
        if own is None or self.mask is None:
            return own if self.mask is None else self.mask
        return own & self.mask


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


class Rows(NamedTuple):
    """What a cache keeps of a token: `heads` rows of `width` values."""

    heads: int
    width: int


class Part:
    """A piece of a model that has work to do."""

    def products(self, work: Work) -> list[Product]:
        """The matrix products besides those of `calls`."""
        raise NotImplementedError

    def calls(self, work: Work) -> list[Call]:
        """The calls of `regard.attention`."""
        return []

    def inputs(self, work: Work) -> int:
        """Values kept for the backward pass of the products, beyond what the calls keep."""
        raise NotImplementedError


@dataclass(frozen=True)
class Layer(Part):
    """What all attention layers can say of themselves."""

    d_model: int
    heads: int

    def __post_init__(self) -> None:
        count("d_model", self.d_model, 1)
        count("heads", self.heads, 1)

    @property
    def parameters(self) -> int:
        raise NotImplementedError

    def check(self, work: Work) -> None:
        """Raise for work that the layer cannot do."""

    def inputs(self, work: Work) -> int:
        return work.rows * self.d_model

    @property
    def kept(self) -> tuple[Rows, ...]:
        """Of each token that a cache holds; () where it does not grow, or there is none."""
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
class Grouped(Layer):
    """Query heads in groups that share a key head."""

    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sizes  # checked there

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hkv, D, Dv"""
        return sizes(self.d_model, self.heads, self.kv_heads, self.head_dim, self.value_dim)[2:]


@dataclass(frozen=True)
class Heads(Grouped):
    """Multi-head, grouped-query (kv_heads) and multi-query (1) attention.

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
        Hkv, D, Dv = self.sizes
        asked, kept, out = self.heads * D, Hkv * (D + Dv), self.heads * Dv
        source = self.d_model if self.kv_model is None else self.kv_model
        matrices = self.d_model * (asked + out * (1 + self.gate)) + source * kept
        return matrices + self.bias * (asked + kept) + self.out_bias * self.d_model + self.others

    def products(self, work: Work) -> list[Product]:
        Hkv, D, Dv = self.sizes
        out = self.heads * Dv
        if self.kv_model is None:
            made = [Product("q, k, v", work.rows, self.d_model, self.heads * D + Hkv * (D + Dv))]
        else:
            made = [
                Product("q", work.rows, self.d_model, self.heads * D),
                Product("k, v", work.B * work.Lk, self.kv_model, Hkv * (D + Dv)),
            ]
        gate = [Product("gate", work.rows, self.d_model, out)] * self.gate
        return [*made, *gate, Product("out", work.rows, out, self.d_model)]

    def calls(self, work: Work) -> list[Call]:
        Hkv, D, Dv = self.sizes
        mask = work.narrowed(self.pattern)
        return [Call(work.B, self.heads, work.L, D, Hkv, work.Lk, Dv, work.dtype, mask)]

    @property
    def pattern(self) -> Mask | None:
        """The mask with the window."""
        if self.window is None:
            return self.mask
        window = streaming(self.window, self.sinks)
        return window if self.mask is None else window & self.mask

    @property
    def kept(self) -> tuple[Rows, ...]:
        Hkv, D, Dv = self.sizes
        return Rows(Hkv, D), Rows(Hkv, Dv)

    @property
    def reads_cache(self) -> bool:
        return True

    @property
    def most_kept(self) -> int | None:
        return None if self.window is None else self.window + self.sinks


@dataclass(frozen=True)
class Latent(Layer):
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
    def asked(self) -> int:
        return self.heads * (self.nope_dim + self.rope_dim)

    @property
    def up(self) -> int:
        """Columns of `kv_up`."""
        return self.heads * (self.nope_dim + self.value_dim)

    @property
    def parameters(self) -> int:
        low = self.asked if self.q_rank is None else self.q_rank
        second = 0 if self.q_rank is None else self.q_rank * (self.asked + self.normed)
        latent = self.rank + self.rope_dim
        matrices = self.d_model * (low + latent + self.heads * self.value_dim)
        biases = self.bias * (low + latent) + self.out_bias * self.d_model
        return matrices + second + self.rank * (self.up + self.normed) + biases

    def products(self, work: Work) -> list[Product]:
        way = self._absorbed(work) if self.absorbed else self._expanded(work)
        return [
            *self._asking(work.rows),
            Product("latent", work.rows, self.d_model, self.rank + self.rope_dim),
            *way,
            Product("out", work.rows, self.heads * self.value_dim, self.d_model),
        ]

    def _asking(self, rows: int) -> list[Product]:
        if self.q_rank is None:
            return [Product("q", rows, self.d_model, self.asked)]
        return [
            Product("q, down", rows, self.d_model, self.q_rank),
            Product("q, up", rows, self.q_rank, self.asked),
        ]

    def _expanded(self, work: Work) -> list[Product]:
        """All keys are made anew, those of the cache too."""
        return [Product("k, v, up", work.B * work.Lk, self.rank, self.up)]

    def _absorbed(self, work: Work) -> list[Product]:
        return [
            Product("q into the latent", work.rows, self.nope_dim, self.rank, self.heads),
            Product("v from the latent", work.rows, self.rank, self.value_dim, self.heads),
        ]

    def calls(self, work: Work) -> list[Call]:
        mask = work.narrowed(self.mask)
        B, H, L, Lk, dtype = work.B, self.heads, work.L, work.Lk, work.dtype
        if self.absorbed:
            return [Call(B, H, L, self.rank + self.rope_dim, 1, Lk, self.rank, dtype, mask, shared=True)]
        return [Call(B, H, L, self.nope_dim + self.rope_dim, H, Lk, self.value_dim, dtype, mask)]

    def inputs(self, work: Work) -> int:
        """x, compressed vectors, what `kv_up` made besides v (or queries before W_uk), the joined result."""
        way = self.asked if self.absorbed else self.rank + self.heads * self.nope_dim
        return work.rows * (self.d_model + (self.q_rank or 0) + way + self.heads * self.value_dim)

    @property
    def kept(self) -> tuple[Rows, ...]:
        return (Rows(1, self.rank + self.rope_dim),)

    @property
    def reads_cache(self) -> bool:
        return self.absorbed


def refuse(layer: Layer, work: Work, *names: str) -> None:
    """Raise for what the layer has no form of."""
    for name in names:
        if (given := getattr(work, name)) not in (None, 0):
            raise ValueError(f"{name}: expected none for {type(layer).__name__}, got {describe(given)}")
