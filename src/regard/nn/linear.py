"""Projections around `regard.linear_attention`: a layer whose cache does not grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from .._api.linear_attention import FeatureMap, feature_map_of, linear_attention
from .._tools.arguments import count, describe
from ..cache import LinearCache
from ._options import is_nested
from ._sizes import GroupedHeads, join_heads, split_heads

Decay = Literal["head", "token"]


class LinearAttention(GroupedHeads):
    """Linear attention with its projections: classic, with decay (RetNet, Mamba-2), or delta rule (DeltaNet).

    Args:
        d_model: the width of the tokens and of the result.
        heads: query heads Hq.
        kv_heads: key heads Hkv, a divisor of `heads`, each with a state of its own. Default: as many.
        head_dim: D of queries and keys. Default d_model / heads.
        value_dim: Dv. Default `head_dim`.
        feature_map: as in `regard.linear_attention`. Default "elu+1"; "unit" with `delta`, which needs keys
            of length 1.
        normalize: divide by the sum of the weights. Default: without `delta`.
        causal: whether tokens see only those before them.
        decay: what is left of the state at each token: None, all; "head", a learned share for each key head,
            at first 1 - 2^(-5 - h) as in RetNet; "token", the sigmoid of a projection of the token.
        delta: the delta rule, with beta the sigmoid of a projection of the token.
        out_norm: a norm of each head's result, made by `out_norm(value_dim)`, such as `nn.RMSNorm`.
        gate: multiply the heads' results by the sigmoid of a projection of x, before the last projection.
        bias: whether the projections of queries, keys and values, and the last one, have biases.

    Example:
        >>> layer = regard.nn.LinearAttention(512, 8, decay="token", delta=True, out_norm=nn.RMSNorm)
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
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        out = heads * self.value_dim
        self.qkv = nn.Linear(d_model, sum(self._widths), bias, **made)
        self.head_decay = nn.Parameter(_retention(self.kv_heads, made)) if decay == "head" else None
        self.token_decay = _forgetting(d_model, self.kv_heads, made) if decay == "token" else None
        self.beta = nn.Linear(d_model, self.kv_heads, True, **made) if delta else None
        self.out_norm = None if out_norm is None else out_norm(self.value_dim).to(**made)
        self.gate = nn.Linear(d_model, out, False, **made) if gate else None
        self.out = nn.Linear(out, d_model, bias, **made)

    def _check_options(self, decay: object, delta: bool) -> None:
        if decay not in (None, "head", "token"):
            raise ValueError(f"decay: expected None, 'head' or 'token', got {describe(decay)}")
        if delta and self.normalize:
            raise ValueError("normalize: expected False with delta, whose weights are not positive, got True")
        if not self.causal and (decay is not None or delta):
            raise ValueError("causal: expected True with decay or delta, which follow the order of tokens")

    def forward(
        self, x: Tensor, *, lengths: Tensor | None = None, cache: LinearCache | None = None
    ) -> Tensor:
        """Applies linear attention among the tokens of x.

        Args:
            x: (B, L, d_model) or (L, d_model).
            lengths: (B,): the first n tokens of each sample are real, the rest is padding.
            cache: what `new_cache` made: x follows the tokens that it has seen. Only with causal=True.
        """
        self._check(x, cache)
        q, k, v = self.qkv(x).split(self._widths, -1)
        q, k, v = split_heads(q, self.heads), split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        options: dict[str, Any] = {
            "feature_map": self.feature_map, "log_decay": self._log_decay(x), "beta": self._beta(x),
            "lengths": lengths,
        }  # fmt: skip
        if cache is not None:
            found = cache.attend(q, k, v, **options)
        else:
            found = linear_attention(q, k, v, causal=self.causal, normalize=self.normalize, **options)
        found = found if self.out_norm is None else self.out_norm(found)
        joined = join_heads(found)
        out: Tensor = self.out(joined if self.gate is None else joined * self.gate(x).sigmoid())
        return out

    def new_cache(self, B: int, capacity: int | None = None) -> LinearCache:
        """Returns an empty cache for B samples. `capacity` changes nothing: a state holds any length."""
        if capacity is not None:
            count("capacity", capacity, 1)
        made = self.qkv.weight
        features = feature_map_of(self.feature_map)(made.detach().new_ones(1, self.head_dim)).shape[-1]
        sizes, normalize = (self.kv_heads, features, self.value_dim), self.normalize
        return LinearCache(B, *sizes, normalize=normalize, dtype=made.dtype, device=made.device)

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """Returns the log decay, (Hkv,) or (..., Hkv, L)."""
        if self.head_decay is not None:
            return F.logsigmoid(self.head_decay)
        return None if self.token_decay is None else F.logsigmoid(self.token_decay(x)).transpose(-2, -1)

    def _beta(self, x: Tensor) -> Tensor | None:
        """Returns beta (..., Hkv, L)."""
        return None if self.beta is None else self.beta(x).sigmoid().transpose(-2, -1)

    def _check(self, x: Tensor, cache: LinearCache | None) -> None:
        if is_nested("x", x) or x.dim() not in (2, 3) or x.shape[-1] != self.d_model:
            shape = f"(B, L, d_model = {self.d_model}) or (L, d_model)"
            raise ValueError(f"x: expected {shape}, got {describe(x)}")
        if cache is None:
            return
        if x.dim() != 3:
            raise ValueError(f"x: expected (B, L, d_model) with a cache, got {describe(x)}")
        if not self.causal:
            raise ValueError("cache: expected None with causal=False, which needs all tokens at once")
        if not isinstance(cache, LinearCache) or cache.normalize != self.normalize:
            expected = f"a LinearCache with normalize={self.normalize}, as new_cache makes it"
            raise ValueError(f"cache: expected {expected}, got {describe(cache)}")


def _retention(heads: int, made: dict[str, Any]) -> Tensor:
    """Returns logits (Hkv,) whose sigmoids are 1 - 2^(-5 - h)."""
    kept = 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))
    return torch.empty(heads, **made).copy_(kept.logit())


def _forgetting(d_model: int, heads: int, made: dict[str, Any]) -> nn.Linear:
    """Returns a projection that initially keeps about 98 % of the state."""
    projection = nn.Linear(d_model, heads, True, **made)
    nn.init.constant_(projection.bias, 4.0)
    return projection
