"""The public function `linear_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NoReturn, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .._autograd.linear import run
from .._backends.dispatch import select
from .._call.layout import restore_out
from .._call.linear import LinearOptions, LinearResult, LinearState, check, state_dims
from .._call.spec import Spec
from .._tools.arguments import describe
from .._tools.words import hide_unknown, unknown_keyword

FeatureMap = Callable[[Tensor], Tensor]
FEATURE_MAPS: dict[str, FeatureMap] = {
    "identity": lambda x: x,
    "elu+1": lambda x: F.elu(x).add_(1),
    "relu": F.relu,
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "unit": lambda x: F.normalize(x, dim=-1),
}


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    causal: bool = True, feature_map: str | FeatureMap | None = None, normalize: bool = False,
    log_decay: Tensor | float | None = None, beta: Tensor | float | None = None, scale: float | None = None,
    lengths: Tensor | None = None, state: LinearState | None = None, return_state: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...  # fmt: skip


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    causal: bool = True, feature_map: str | FeatureMap | None = None, normalize: bool = False,
    log_decay: Tensor | float | None = None, beta: Tensor | float | None = None, scale: float | None = None,
    lengths: Tensor | None = None, state: LinearState | None = None, return_state: Literal[True],
    impl: str = "auto",
) -> tuple[Tensor, LinearState]: ...  # fmt: skip


@hide_unknown
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    causal: bool = True, feature_map: str | FeatureMap | None = None, normalize: bool = False,
    log_decay: Tensor | float | None = None, beta: Tensor | float | None = None, scale: float | None = None,
    lengths: Tensor | None = None, state: LinearState | None = None, return_state: bool = False,
    impl: str = "auto", **unknown: NoReturn,
) -> Tensor | tuple[Tensor, LinearState]:  # fmt: skip
    """Computes linear attention: no softmax, O(L) time, a constant-size state instead of a cache.

    For each token, with phi the feature map and S (D, Dv) the state:

        S <- exp(log_decay) S
        S <- S + phi(k) u^T        u = v, or with beta (the delta rule)  u = beta (v - S^T phi(k))
        o =  scale phi(q)^T S      divided by the sum of the weights if normalize=True

    Args:
        q: queries (..., Hq, L, D) or (L, D) in float64, float32, bfloat16 or float16.
        k: keys (..., Hkv, L, D). Hkv divides Hq as in `attention`.
        v: values (..., Hkv, L, Dv).
        causal: whether a token attends only to itself and earlier tokens. If False, every query
            attends to every key, the numbers of queries and keys may differ, and `log_decay` and
            `beta` must be None.
        feature_map: phi, applied to q and k: "identity" (or None), "elu+1", "relu", "exp",
            "softmax" (over D), "unit" (vectors of length 1), or a function of a tensor that may
            change its last dim.
        normalize: whether to divide by the sum of the weights, phi(q) . (sum of phi(k)), as softmax
            does. Use it with a non-negative phi. If the weights of a query sum to 0, its output is
            zeros. Cannot be combined with `beta`.
        log_decay: the logarithm of the factor by which the state decays at each token, usually
            negative. A number, one value for each head (Hkv,), or one for each token (..., Hkv, L),
            in q's dtype or float32.
        beta: how much of the value stored under k is replaced by v, from 0 (nothing) to 1 (all).
            The same shapes as for `log_decay`.
        scale: multiplies phi(q).phi(k). Default 1 / sqrt(D), where D is the size of phi(q). It has
            no effect if `normalize` is True.
        lengths: (B,) integers, the number of tokens of each sample. Padding leaves the state
            unchanged. With causal=True, the output rows of padding are zeros.
        state: the state that an earlier call returned. q, k and v are the tokens that follow the
            tokens of that call.
        return_state: whether to return the state after the last token, too.
        impl: "auto", "native", "torch" or "reference". A backend chosen by name is
            never replaced by another.

    Returns:
        out (..., Hq, L, Dv) with q's dtype and memory order. With `return_state` also a
        `LinearState` in float32 (float64 for float64).

    Example:
        >>> q = k = v = torch.randn(2, 8, 1000, 64)
        >>> out, state = regard.linear_attention(
        ...     q, k, v, feature_map="elu+1", normalize=True, return_state=True)
        >>> state.S.shape
        torch.Size([2, 8, 64, 64])
    """
    if unknown:
        raise unknown_keyword(linear_attention, unknown)
    q, k = _features(feature_map, q, k)
    call = check(q, k, v, scale, LinearOptions(causal, normalize, log_decay, beta, lengths, state))
    name, spec = select("linear", call, impl), call.spec
    result = run(call, name)
    out = result.out if name == "native" and spec.rank == 4 else restore_out(spec, result.out)
    return (out, _state(spec, result)) if return_state else out


def _features(feature_map: str | FeatureMap | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Applies the feature map to q and k, and checks the shapes of the results."""
    if feature_map is None or feature_map == "identity":
        return q, k
    phi = feature_map_of(feature_map)
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {describe(x)}")
    mapped = phi(q), phi(k)
    for name, x, y in zip("qk", (q, k), mapped, strict=True):
        if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1]:
            expected = f"{tuple(x.shape[:-1])} and any last dim, as for {name} {tuple(x.shape)}"
            raise ValueError(f"feature_map: expected a result of shape {expected}, got {describe(y)}")
    return mapped


def feature_map_of(feature_map: str | FeatureMap) -> FeatureMap:
    """Returns the feature map with the given name. A function is returned unchanged."""
    if callable(feature_map):
        return feature_map
    if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        known = ", ".join(FEATURE_MAPS)
        raise ValueError(f"feature_map: expected one of {known}, or a function, got {describe(feature_map)}")
    return FEATURE_MAPS[feature_map]


def _state(spec: Spec, result: LinearResult) -> LinearState:
    """Returns the final state of a result, with the caller's leading dims."""
    if spec.rank == 4:
        return LinearState(result.S, result.z)
    outer = state_dims(spec)
    z = None if result.z is None else result.z.reshape(*outer, spec.D)
    return LinearState(result.S.reshape(*outer, spec.D, spec.Dv), z)
