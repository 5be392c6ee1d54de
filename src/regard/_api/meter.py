"""The public function `compare_to_exact`: the error of an approximation of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._call.check import fail
from .._tools.arguments import describe
from .._tools.modes import evaluating
from ..masks import Causal, Lengths, Mask
from .attention import attention

Attend = Callable[..., Any]
# Tolerances of two checks: that an approximation is linear in v, and that its weights are
# probabilities. They allow for float32 rounding; 16-bit results add the epsilon of their dtype.
LINEAR, PROBABILITY = 1e-3, 1e-4


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare_to_exact`. It prints as a table.

    `kl` and `top1` compare the attention weights. They are None if they are not defined for the
    approximation, or if `compare_to_exact` was called with weights=False.
    """

    error: float  # |out - exact| / |exact| in the L2 norm, over all rows compared
    kl: float | None  # nats, mean over rows of KL(approximate weights || exact weights)
    top1: float | None  # fraction of rows in which approximation and exact attention have the same top key
    rows: int  # query rows compared, over samples and heads

    def __repr__(self) -> str:
        undefined = "not defined"
        lines = {
            "relative output error": f"{self.error:.3g}",
            "KL of the weights": undefined if self.kl is None else f"{self.kl:.3g} nats",
            "top-1 agreement": undefined if self.top1 is None else f"{self.top1:.1%}",
            "query rows": f"{self.rows:,}",
        }
        return "\n".join(f"{name:<22}  {text}" for name, text in lines.items())


def compare_to_exact(
    approximation: nn.Module | Attend, q: Tensor, k: Tensor, v: Tensor, *, causal: bool | None = None,
    lengths: Tensor | None = None, scale: float | None = None, weights: bool = True, **options: Any,
) -> Comparison:  # fmt: skip
    """Compares an approximation of attention with exact attention on the same q, k and v.

    The weights of the approximation are recovered from its results: with unit vectors as values,
    the result equals the weights. Top-1 agreement is the fraction of query rows in which both give
    the largest weight to the same key. It is defined if the approximation is linear in v. KL is
    defined if, in addition, the weights of the approximation are probabilities. KL(approximate ||
    exact) stays finite for a sparse pattern: if the pattern keeps keys with a total exact weight of
    p and is otherwise exact, the KL is -log p.

    Args:
        approximation: a function (q, k, v, **options) -> out, or a module with a method `attend` of
            this form, such as the modules of `regard.nn`. `attend` excludes the projections. A
            module is put into evaluation mode for the comparison.
        q: (B, H, Lq, D).
        k: (B, Hkv, Lk, D), Hkv a divisor of H.
        v: (B, Hkv, Lk, Dv).
        causal: whether exact attention is causal. Default: the module's `causal`, or False.
        lengths: (B,) the number of tokens of each sample. Passed to the approximation unless None.
            Rows of padding are not compared.
        scale: the scale of exact attention. Default 1 / sqrt(D).
        weights: whether to compare the weights, too. This calls the approximation Lk / Dv more
            times.
        options: keyword arguments of the approximation.

    Example:
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64)
        >>> regard.compare_to_exact(regard.nn.PerformerAttention(512, 8, features=256), q, k, v)
    """
    _check(approximation, q, k, v, lengths)
    attend = _attend_of(approximation)
    options = options if lengths is None else options | {"lengths": lengths}
    exact = _Exact(q, k, v, _is_causal(approximation, causal), lengths, scale)
    modules = [approximation] if isinstance(approximation, nn.Module) else []
    with torch.no_grad(), evaluating(*modules):
        out = attend(q, k, v, **options)
        _check_out(out, exact.out)
        sums = _WeightSums(exact) if weights else None
        if sums is not None:
            for first in range(0, k.shape[2], v.shape[3]):
                sums.add(first, attend(q, k, _unit_values(v, first), **options))
    error = exact.relative_error(out, exact.out)
    if sums is None or not exact.relative_error(sums.rebuilt, out) < LINEAR + exact.rounding:
        return Comparison(error, None, None, exact.rows)
    return Comparison(error, sums.kl(), sums.top1(), exact.rows)


class _Exact:
    """Exact attention on q, k and v: its output, and its log weights for any range of keys.

    The constructor computes the output, `log_weights` the log weights.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: Tensor | None, scale: float | None
    ) -> None:
        groups = q.shape[1] // k.shape[1]
        self.q, self.k, self.v = q, *(x.repeat_interleave(groups, 1) for x in (k, v))
        self.scale = q.shape[3] ** -0.5 if scale is None else scale
        with torch.no_grad():
            mask = _mask(causal, lengths)
            self.out, self.lse = attention(q, k, v, mask=mask, scale=self.scale, return_lse=True)
        B, H, Lq, Lk = *q.shape[:3], k.shape[2]
        lengths = torch.full((B,), max(Lq, Lk)) if lengths is None else lengths
        self.causal, self.lengths = causal, lengths.to(q.device)[:, None]
        self.real = (self._range(0, Lq) < self.lengths)[:, None].expand(B, H, Lq)
        self.rows = int(self.real.sum())
        # Added to LINEAR and PROBABILITY, which allow for float32 rounding only.
        self.rounding = torch.finfo(q.dtype).eps if q.dtype.itemsize == 2 else 0.0

    def _range(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self.q.device)

    def log_weights(self, keys: slice) -> Tensor:
        """Returns the log weights (B, H, Lq, n) of n keys, which are -inf for masked keys."""
        q, k = (x.to(self.lse.dtype) for x in (self.q, self.k[:, :, keys]))
        s = self.scale * q @ k.mT - self.lse.unsqueeze(-1)
        positions = self._range(keys.start, keys.stop)
        if self.causal:
            last = self._range(self.k.shape[2] - self.q.shape[2], self.k.shape[2])
            s = s.masked_fill(positions > last[:, None], -torch.inf)
        return s.masked_fill((positions >= self.lengths)[:, None, None], -torch.inf)

    def relative_error(self, actual: Tensor, expected: Tensor) -> float:
        """Computes the relative L2 error over all rows except padding."""
        difference, norm = (x.double()[self.real].norm() for x in (actual - expected, expected))
        return float(difference / norm)


class _WeightSums:
    """Accumulates KL, weight sum and largest weight of every row, one range of keys at a time."""

    def __init__(self, exact: _Exact) -> None:
        self.exact = exact
        shape = exact.q.shape[:3]
        self.rebuilt = torch.zeros_like(exact.out, dtype=exact.lse.dtype)
        self.divergence, self.total, self.lowest = self.rebuilt.new_zeros(3, *shape)
        # (2, B, H, Lq): the largest approximate weight and exact log weight so far, and their keys
        self.best = self.rebuilt.new_full((2, *shape), -torch.inf)
        self.best_key = torch.zeros_like(self.best, dtype=torch.int64)

    def add(self, first: int, weights: Tensor) -> None:
        """Adds the approximate weights (B, H, Lq, Dv) of keys `first` to `first + Dv - 1`."""
        n = min(weights.shape[3], self.exact.k.shape[2] - first)
        keys, w = slice(first, first + n), weights[..., :n].to(self.rebuilt.dtype)
        log_p = self.exact.log_weights(keys)
        self.rebuilt += w @ self.exact.v[:, :, keys].to(w.dtype)
        self.total += w.sum(-1)
        self.lowest = torch.minimum(self.lowest, w.amin(-1))
        self.divergence += torch.where(w > 0, w * (w.clamp(min=1e-38).log() - log_p), 0).sum(-1)
        for side, values in enumerate((w, log_p)):
            largest, index = values.max(-1)
            larger = largest > self.best[side]
            self.best[side][larger] = largest[larger]
            self.best_key[side][larger] = index[larger] + first

    def kl(self) -> float | None:
        """Returns the mean KL divergence over rows, or None if a row is not a distribution."""
        real = self.exact.real
        tolerance = PROBABILITY + self.exact.rounding
        valid = (self.lowest > -tolerance) & ((self.total - 1).abs() < tolerance)
        return max(0.0, float(self.divergence[real].mean())) if bool(valid[real].all()) else None

    def top1(self) -> float:
        return float((self.best_key[0] == self.best_key[1])[self.exact.real].float().mean())


def _mask(causal: bool, lengths: Tensor | None) -> Mask | None:
    mask = Causal() if causal else None
    if lengths is None:
        return mask
    return Lengths(lengths) if mask is None else mask & Lengths(lengths)


def _unit_values(v: Tensor, first: int) -> Tensor:
    """Returns values of v's shape: row first + i is unit vector i, all other rows are zeros."""
    units = torch.zeros_like(v)
    n = min(v.shape[3], v.shape[2] - first)
    units[:, :, first : first + n, :n] = torch.eye(n, dtype=v.dtype, device=v.device)
    return units


# Arguments


def _attend_of(approximation: nn.Module | Attend) -> Attend:
    attend = getattr(approximation, "attend", None) if isinstance(approximation, nn.Module) else approximation
    if not callable(attend):
        name = type(approximation).__name__
        raise TypeError(f"approximation: expected a function or a module with `attend(q, k, v)`, got {name}")
    return attend


def _is_causal(approximation: object, causal: bool | None) -> bool:
    return bool(getattr(approximation, "causal", False)) if causal is None else causal


def _check(approximation: object, q: Tensor, k: Tensor, v: Tensor, lengths: object) -> None:
    if not callable(approximation):
        raise TypeError(f"approximation: expected a function or a module, got {describe(approximation)}")
    if not (lengths is None or isinstance(lengths, Tensor)):
        raise TypeError(f"lengths: expected an integer tensor (B,), got {describe(lengths)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError(f"{name}: expected (B, H, L, D), got {describe(x)}")


def _check_out(out: object, exact: Tensor) -> None:
    if not isinstance(out, Tensor) or out.shape != exact.shape:
        fail(ValueError, "approximation", f"a result of shape {tuple(exact.shape)}", describe(out))
