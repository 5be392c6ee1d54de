"""The quantisation error of 8-bit and 4-bit caches.

Each token has its own scales, so new tokens never change stored codes. Each group of channels has
its own scale, so an outlier channel, common in the keys of trained models, affects only its group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .._api.attention import attention
from .._call.stored import decode, encode
from .._tools.arguments import describe

KINDS = {8: "int8", 4: "int4"}


class QuantizationError(NamedTuple):
    """Relative errors |quantised - exact| / |exact|, in the L2 norm over the whole tensor."""

    bits: int
    k: float
    v: float
    out: float | None  # error of the output of attention; None without q


def quantization_error(
    k: Tensor, v: Tensor, q: Tensor | None = None, *, bits: int = 8, **options: Any
) -> QuantizationError:
    """Returns the relative L2 errors that a `QuantizedCache` causes in k, v and the output.

    Args:
        k, v: float tensors (..., Hkv, Lk, D) and (..., Hkv, Lk, Dv).
        q: (..., Hq, Lq, D). If given, the error of the output is computed, in float64.
        bits: 8 or 4.
        options: further options of `attention`, such as mask and scale.

    Example:
        >>> quantization_error(k, v, q, bits=4, mask=masks.Causal())
        QuantizationError(bits=4, k=0.075, v=0.075, out=0.105)
    """
    bits = check_bits(bits)
    _check_floating(k=k, v=v)
    if q is None and options:
        raise ValueError(f"{', '.join(options)}: expected no options of attention without q")
    exact = tuple(x.detach().double() for x in (k, v))
    kind = KINDS[bits]
    rounded = tuple(decode(*encode(x, kind), kind, x.shape[-1]).double() for x in (k.detach(), v.detach()))
    k_error, v_error = (_relative(a, b) for a, b in zip(rounded, exact, strict=True))
    if q is None:
        return QuantizationError(bits, k_error, v_error, None)
    out, exact_out = (attention(q.detach().double(), *kv, **options) for kv in (rounded, exact))
    return QuantizationError(bits, k_error, v_error, _relative(out, exact_out))


def check_bits(bits: int) -> int:
    if isinstance(bits, bool) or bits not in KINDS:
        raise ValueError(f"bits: expected 8 or 4, got {describe(bits)}")
    return bits


def _check_floating(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name}: expected a float tensor, got {describe(x)}")


def _relative(x: Tensor, exact: Tensor) -> float:
    """Returns the relative L2 error of x. It is 0 if the tensors are equal or empty."""
    difference = (x - exact).norm()
    return float(difference / exact.norm()) if difference != 0 else 0.0
