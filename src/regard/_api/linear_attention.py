"""The verb: linear attention, whose state does not grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .._autograd.linear import run
from .._backends.dispatch import select
from .._call.layout import as_given
from .._call.linear import LinearOptions, LinearResult, LinearState, check, state_dims
from .._call.spec import Spec
from .._tools.arguments import describe

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


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    causal: bool = True, feature_map: str | FeatureMap | None = None, normalize: bool = False,
    log_decay: Tensor | float | None = None, beta: Tensor | float | None = None, scale: float | None = None,
    lengths: Tensor | None = None, state: LinearState | None = None, return_state: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:  # fmt: skip
    """Attention without the softmax: O(L) time, and a state of constant size in place of a cache.

    For each token, with phi the feature map and S (D, Dv) the state:

        S <- exp(log_decay) S
        S <- S + phi(k) u^T        u = v, or with beta (the delta rule)  u = beta (v - S^T phi(k))
        o =  scale phi(q)^T S      divided by the sum of the weights with normalize=True

    Args:
        q: queries (..., Hq, L, D), or (L, D). float64, float32, bfloat16 or float16.
        k: keys (..., Hkv, L, D), Hkv a divisor of Hq as in `attention`.
        v: values (..., Hkv, L, Dv).
        causal: each token sees itself and those before it. False: every query sees every key; then there may
            be other numbers of queries and keys, and neither gates nor the delta rule.
        feature_map: phi, applied to q and k: "identity" (or None), "elu+1", "relu", "exp", "softmax" (over
            D), "unit" (length 1), or a function of a tensor that may change its last dim.
        normalize: divide by the sum of the weights, phi(q) . (sum of phi(k)), as softmax does. Sensible where
            phi is not negative. A row whose weights sum to 0 gives zeros. Not with beta.
        log_decay: the logarithm of what is left of the state at each step, usually below 0: a number, one for
            each head (Hkv,), or one for each token (..., Hkv, L). In q's dtype or float32.
        beta: how much of the old value at k is replaced by v, from 0 to 1; shapes as of `log_decay`.
        scale: multiplies q.k. Default 1 / sqrt(D), D as the feature map leaves it; normalising cancels it.
        lengths: (B,) integers: the first n keys of each sample are real, the rest changes nothing; with
            causal=True rows of padding are zeros.
        state: what an earlier call returned: q, k and v are the tokens that follow.
        return_state: also return the state after the last token.
        impl: "auto", "native", "torch" or "reference". A backend asked for by name never falls back.

    Returns:
        out (..., Hq, L, Dv) with q's dtype and memory order; with `return_state` also a `LinearState` in
        float32 (float64 for float64).

    Example:
        >>> q = k = v = torch.randn(2, 8, 1000, 64)
        >>> out, state = regard.linear_attention(
        ...     q, k, v, feature_map="elu+1", normalize=True, return_state=True)
        >>> state.S.shape
        torch.Size([2, 8, 64, 64])
    """
    q, k = _features(feature_map, q, k)
    call = check(q, k, v, scale, LinearOptions(causal, normalize, log_decay, beta, lengths, state))
    name, spec = select("linear", call, impl), call.spec
    found = run(call, name)
    out = found.out if name == "native" and spec.rank == 4 else as_given(spec, found.out)
    return (out, _state(spec, found)) if return_state else out


def _features(feature_map: str | FeatureMap | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
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


def feature_map_of(given: str | FeatureMap) -> FeatureMap:
    """A feature map by its name, or itself."""
    if callable(given):
        return given
    if not isinstance(given, str) or given not in FEATURE_MAPS:
        known = ", ".join(FEATURE_MAPS)
        raise ValueError(f"feature_map: expected one of {known}, or a function, got {describe(given)}")
    return FEATURE_MAPS[given]


def _state(spec: Spec, found: LinearResult) -> LinearState:
    if spec.rank == 4:
        return LinearState(found.S, found.z)
    outer = state_dims(spec)
    z = None if found.z is None else found.z.reshape(*outer, spec.D)
    return LinearState(found.S.reshape(*outer, spec.D, spec.Dv), z)
