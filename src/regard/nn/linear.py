"""`LinearAttention`: `regard.linear_attention` with projections, and a cache of constant size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from .._api.linear_attention import FeatureMap, feature_map_of, linear_attention
from .._api.projection import Linear
from .._tools.arguments import count, describe
from ..cache import LinearCache
from ._options import is_nested
from ._padding import finite_padding
from ._parallel import checked_parallel, on_shards
from ._sizes import GroupedHeads, join_heads, split_heads

if TYPE_CHECKING:
    from ..distributed import SequenceParallel

Decay = Literal["head", "token"]


class LinearAttention(GroupedHeads):
    """Linear attention with input and output projections: (B, L, d_model) -> (B, L, d_model).

    Options add decay (RetNet, Mamba-2) and the delta rule (DeltaNet).

    Args:
        d_model: width of the input and of the output.
        heads: number of query heads Hq.
        kv_heads: number of key heads Hkv, a divisor of `heads`. Each key head has one state.
            Default: `heads`.
        head_dim: D, the width of a query and key head. Default: d_model / heads.
        value_dim: Dv, the width of a value head. Default: `head_dim`.
        feature_map: as in `regard.linear_attention`. Default: "elu+1", or "unit" with `delta`,
            because the delta rule needs keys of norm 1.
        normalize: if True, divides the output by the sum of the weights. Default: True without
            `delta`, False with it.
        causal: if True, a token attends to itself and to earlier tokens.
        decay: the factor by which the state shrinks at each token. None: no decay. "head": a
            learned factor per key head, initially 1 - 2^(-5 - h) for head h, as in RetNet.
            "token": the sigmoid of a projection of the token.
        delta: if True, applies the delta rule. Its factor beta is the sigmoid of a projection of
            the token.
        out_norm: factory of a norm of each head's output, called as `out_norm(value_dim)`. Example:
            `nn.RMSNorm`.
        gate: if True, the attention output is multiplied by the sigmoid of a projection of x before
            the output projection.
        bias: if True, the projections of queries, keys and values and the output projection have
            biases.

    Example:
        >>> gated_delta = {"decay": "token", "delta": True, "out_norm": nn.RMSNorm}
        >>> layer = regard.nn.LinearAttention(512, 8, **gated_delta)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])
    """

    _shown = ("heads", "kv_heads", "causal", "normalize")

    def __init__(
        self, d_model: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, feature_map: str | FeatureMap | None = None,
        normalize: bool | None = None, causal: bool = True, decay: Decay | None = None, delta: bool = False,
        out_norm: Callable[[int], nn.Module] | None = None, gate: bool = False, bias: bool = False,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, heads, kv_heads, head_dim, value_dim)
        self.feature_map = ("unit" if delta else "elu+1") if feature_map is None else feature_map
        feature_map_of(self.feature_map)
        self.normalize, self.causal = not delta if normalize is None else normalize, causal
        self._check_options(decay, delta)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        joined = heads * self.value_dim
        self.qkv = Linear(d_model, sum(self._widths), bias, **factory)
        self.head_decay = nn.Parameter(_retnet_logits(self.kv_heads, factory)) if decay == "head" else None
        self.token_decay = _decay_projection(d_model, self.kv_heads, factory) if decay == "token" else None
        self.beta = Linear(d_model, self.kv_heads, True, **factory) if delta else None
        self.out_norm = None if out_norm is None else out_norm(self.value_dim).to(**factory)
        self.gate = Linear(d_model, joined, False, **factory) if gate else None
        self.out = Linear(joined, d_model, bias, **factory)

    def _check_options(self, decay: object, delta: bool) -> None:
        if decay not in (None, "head", "token"):
            raise ValueError(f"decay: expected None, 'head' or 'token', got {describe(decay)}")
        if delta and self.normalize:
            raise ValueError("normalize: expected False with delta, whose weights may be negative, got True")
        if not self.causal and (decay is not None or delta):
            raise ValueError("causal: expected True with decay or delta, got False")

    def forward(
        self, x: Tensor, *, lengths: Tensor | None = None, cache: LinearCache | None = None,
        parallel: SequenceParallel | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes linear self-attention over x. The output has x's shape.

        Args:
            x: (B, L, d_model) or (L, d_model).
            lengths: (B,), the number of real tokens of each sample. The rest is padding.
            cache: a cache from `new_cache`. x continues the cached sequences. A cache needs
                causal=True.
            parallel: the ranks that share the sequence. x and the output are then this rank's
                shards, and `lengths` those of the whole sequence.
        """
        self._check(x, cache, parallel)
        parallel = None if parallel is None else checked_parallel(parallel, "x", x).of_queries
        x = finite_padding(x, lengths, parallel=parallel)
        q, k, v = self.qkv(x).split(self._widths, -1)
        q, k, v = split_heads(q, self.heads), split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        options: dict[str, Any] = {
            "feature_map": self.feature_map, "log_decay": self._log_decay(x), "beta": self._beta(x),
            "lengths": lengths,
        }  # fmt: skip
        if cache is not None:
            attended = cache.attend(q, k, v, **options)
        else:
            options |= {"causal": self.causal, "normalize": self.normalize}
            if parallel is None:
                attended = linear_attention(q, k, v, **options)
            else:
                attended = on_shards(parallel.linear_attention, (q, k, v), options)
        joined = join_heads(attended if self.out_norm is None else self.out_norm(attended))
        out: Tensor = self.out(joined if self.gate is None else joined * self.gate(x).sigmoid())
        return out

    def new_cache(self, B: int, capacity: int | None = None) -> LinearCache:
        """Returns an empty `LinearCache` for B samples.

        `capacity` is checked but has no effect, because the size of the cache is constant.
        """
        if capacity is not None:
            count("capacity", capacity, 1)
        weight = self.qkv.weight
        features = feature_map_of(self.feature_map)(weight.detach().new_ones(1, self.head_dim)).shape[-1]
        sizes, normalize = (self.kv_heads, features, self.value_dim), self.normalize
        return LinearCache(B, *sizes, normalize=normalize, dtype=weight.dtype, device=weight.device)

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """Returns the log decay: (Hkv,) per head, (..., Hkv, L) per token, or None."""
        if self.head_decay is not None:
            return F.logsigmoid(self.head_decay)
        return None if self.token_decay is None else F.logsigmoid(self.token_decay(x)).transpose(-2, -1)

    def _beta(self, x: Tensor) -> Tensor | None:
        """Returns the delta rule's beta (..., Hkv, L), or None without the delta rule."""
        return None if self.beta is None else self.beta(x).sigmoid().transpose(-2, -1)

    def _check(self, x: Tensor, cache: LinearCache | None, parallel: object) -> None:
        if is_nested("x", x) or x.dim() not in (2, 3) or x.shape[-1] != self.d_model:
            shape = f"(B, L, d_model = {self.d_model}) or (L, d_model)"
            raise ValueError(f"x: expected {shape}, got {describe(x)}")
        if cache is None:
            return
        if parallel is not None:
            raise ValueError(f"cache: expected None with parallel, got {describe(cache)}")
        if x.dim() != 3:
            raise ValueError(f"x: expected (B, L, d_model) with a cache, got {describe(x)}")
        if not self.causal:
            raise ValueError("cache: expected None with causal=False, which needs all tokens at once")
        if not isinstance(cache, LinearCache) or cache.normalize != self.normalize:
            expected = f"a LinearCache with normalize={self.normalize}, as from new_cache"
            raise ValueError(f"cache: expected {expected}, got {describe(cache)}")


def _retnet_logits(heads: int, factory: dict[str, Any]) -> Tensor:
    """Returns logits (Hkv,) whose sigmoids are RetNet's decay factors 1 - 2^(-5 - h) for head h."""
    decay = 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))
    return torch.empty(heads, **factory).copy_(decay.logit())


def _decay_projection(d_model: int, heads: int, factory: dict[str, Any]) -> nn.Linear:
    """Returns a projection to decay logits. The initial decay factor is about 0.98."""
    projection = Linear(d_model, heads, True, **factory)
    nn.init.constant_(projection.bias, 4.0)
    return projection
