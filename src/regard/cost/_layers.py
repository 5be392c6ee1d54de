"""Specs of attention layers.

A spec computes the layer's number of parameters, matrix products, attention calls and cached rows.
Names and defaults are the same as in `regard.nn`. The batch is described by a separate `Work`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from .._tools.arguments import count, describe
from ..masks import Mask, sliding, streaming
from ..masks._both import both
from ..nn._sizes import sizes
from ._call import CallSpec


@dataclass(frozen=True)
class Work:
    """A batch of B samples with L new tokens each, after `past` tokens in a cache."""

    L: int
    past: int = 0
    B: int = 1
    dtype: torch.dtype = torch.float32
    mask: Mask | None = None  # for packed documents or padding; combined with the layer's mask by `&`

    @property
    def Lk(self) -> int:
        return self.L + self.past

    @property
    def rows(self) -> int:
        return self.B * self.L

    def narrowed(self, layer_mask: Mask | None) -> Mask | None:
        """Returns a mask that allows the pairs that both `layer_mask` and `self.mask` allow."""
        return both(layer_mask, self.mask)


class Product(NamedTuple):
    """Matrix products (m, k) @ (k, n). There are `times` products of this size."""

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
        """Number of elements read: both factors of each product, once."""
        return self.times * self.k * (self.m + self.n)

    @property
    def written(self) -> int:
        """Number of elements written: the results of all products."""
        return self.times * self.m * self.n


class KeptRows(NamedTuple):
    """Rows that a cache stores per token: `heads` rows of `width` elements."""

    heads: int
    width: int


class PartSpec:
    """Base of the specs of all parts of a model: attention layers, feed-forward layers, logits."""

    d_model: int

    def products(self, work: Work) -> list[Product]:
        """Returns the matrix products for `work`, except those inside attention calls."""
        raise NotImplementedError

    def calls(self, work: Work) -> list[CallSpec]:
        """Returns the specs of the attention calls that the part makes for `work`."""
        return []

    def inputs(self, work: Work) -> int:
        """Returns how many elements the part saves for backward.

        Elements that its attention calls save are not included. By default, the part saves only its
        input x.
        """
        return work.rows * self.d_model

    @property
    def weights(self) -> int:
        """Number of entries of all weight matrices.

        Valid only if every product multiplies tokens by a weight matrix.
        """
        return sum(product.times * product.k * product.n for product in self.products(Work(1)))


@dataclass(frozen=True)
class LayerSpec(PartSpec):
    """Base of the specs of all attention layers."""

    d_model: int
    heads: int
    refused: ClassVar[tuple[str, ...]] = ()  # fields of `Work` that the layer does not support

    def __post_init__(self) -> None:
        count("d_model", self.d_model, 1)
        count("heads", self.heads, 1)

    @property
    def parameters(self) -> int:
        raise NotImplementedError

    def check(self, work: Work) -> None:
        """Raises ValueError if the layer does not support the past tokens or the mask of `work`."""
        for name in self.refused:
            if (value := getattr(work, name)) not in (None, 0):
                raise ValueError(f"{name}: expected none for {type(self).__name__}, got {describe(value)}")

    @property
    def kept(self) -> tuple[KeptRows, ...]:
        """Rows that a cache stores per token. Empty if the layer has no cache that grows."""
        return ()

    @property
    def reads_cache(self) -> bool:
        """Whether the attention calls read the cached rows directly, in the cache's format."""
        return False

    @property
    def state(self) -> int:
        """Number of elements per sample of the recurrent state, or 0 if the layer has none."""
        return 0

    @property
    def most_kept(self) -> int | None:
        """The largest number of tokens that a cache must store, or None if there is no limit."""
        return None

    @property
    def kv_values(self) -> int:
        """Number of cached elements per token."""
        return sum(rows.heads * rows.width for rows in self.kept)


@dataclass(frozen=True)
class GroupedSpec(LayerSpec):
    """Base of the specs of layers in which several query heads may share a key head."""

    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        _ = self.sizes  # checks the sizes

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes Hkv, D and Dv, checked and with defaults filled in."""
        return sizes(self.d_model, self.heads, self.kv_heads, self.head_dim, self.value_dim)[2:]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of channels of all query heads, of all keys and values, of all head outputs."""
        Hkv, D, Dv = self.sizes
        return self.heads * D, Hkv * (D + Dv), self.heads * Dv


@dataclass(frozen=True)
class AttentionSpec(GroupedSpec):
    """Attention as in `nn.Attention`: multi-head, grouped-query, or multi-query (kv_heads=1).

    Args:
        window, sinks: each token attends to the last `window` tokens, itself included, and to the
            first `sinks` tokens.
        mask: the mask of every call, such as `masks.Causal()`.
        bias, out_bias, gate: as in `nn.Attention`.
        kv_model: the width of the context in cross-attention. The context has `Work.Lk` tokens.
        value_model: the width of the tokens from which values are computed, `Work.Lk` tokens.
        out: if False, there is no output projection.
        others: number of parameters outside the projections: norms, sink logits, position tables.
    """

    kv_model: int | None = None
    value_model: int | None = None
    bias: bool = False
    out: bool = True
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
        kv_model, keys = self.kv_model or d, work.B * work.Lk
        if self.value_model is not None:
            Hkv, D, Dv = self.sizes
            products = [Product("k", keys, kv_model, Hkv * D), Product("v", keys, self.value_model, Hkv * Dv)]
            products.insert(0, Product("q", work.rows, d, q))
        elif self.kv_model is not None:
            products = [Product("q", work.rows, d, q), Product("k, v", keys, kv_model, kv)]
        else:
            products = [Product("q, k, v", work.rows, d, q + kv)]
        gate = [Product("gate", work.rows, d, out)] * self.gate
        return [*products, *gate, *[Product("out", work.rows, out, d)] * self.out]

    def calls(self, work: Work) -> list[CallSpec]:
        Hkv, D, Dv = self.sizes
        mask = work.narrowed(self.pattern)
        return [CallSpec(work.B, self.heads, work.L, D, Hkv, work.Lk, Dv, work.dtype, mask)]

    @property
    def pattern(self) -> Mask | None:
        """The mask of every call, restricted to the window and the sinks if there is a window."""
        if self.window is None:
            return self.mask
        window = streaming(self.window, self.sinks) if self.sinks else sliding(self.window)
        return both(window, self.mask)

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
        rank, nope_dim, rope_dim, value_dim: the channels of the latent, of a head's key without
            and with rotation, and of a head's value. DeepSeek-V3 has 512, 128, 64 and 128.
        absorbed: if True, queries attend to the latents directly. If False, the keys and values of
            all heads are computed from the latents first.
        normed: if True, the latents of keys and of queries (`q_rank`) have RMS norms.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    bias: bool = False
    out_bias: bool = False
    normed: bool = True
    absorbed: bool = False
    mask: Mask | None = None

    @property
    def q_width(self) -> int:
        """The number of channels of all query heads together."""
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
        # The expanded form computes keys and values of all tokens in every call, cached tokens included.
        up = [Product("k, v, up", work.B * work.Lk, self.rank, H * (nope + Dv))]
        if self.absorbed:
            up = [
                Product("q into the latent", rows, nope, self.rank, H),
                Product("v from the latent", rows, self.rank, Dv, H),
            ]
        latent = Product("latent", rows, d, self.rank + self.rope_dim)
        return [*q, latent, *up, Product("out", rows, H * Dv, d)]

    def calls(self, work: Work) -> list[CallSpec]:
        H, D, Hkv, Dv = self.heads, self.nope_dim + self.rope_dim, self.heads, self.value_dim
        if self.absorbed:
            D, Hkv, Dv = self.rank + self.rope_dim, 1, self.rank
        mask = work.narrowed(self.mask)
        return [CallSpec(work.B, H, work.L, D, Hkv, work.Lk, Dv, work.dtype, mask, shared=self.absorbed)]

    def inputs(self, work: Work) -> int:
        """Counts the elements saved for backward: x, the query latents and the heads' output.

        The expanded form also saves the latents and the unrotated keys. The absorbed form also
        saves the queries before their product with W_uk. Elements that the attention call saves are
        not included.
        """
        expanded = self.q_width if self.absorbed else self.rank + self.heads * self.nope_dim
        return work.rows * (self.d_model + (self.q_rank or 0) + expanded + self.heads * self.value_dim)

    @property
    def kept(self) -> tuple[KeptRows, ...]:
        return (KeptRows(1, self.rank + self.rope_dim),)

    @property
    def reads_cache(self) -> bool:
        return self.absorbed
