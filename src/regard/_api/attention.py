"""The public functions `attention` and `weights`."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, overload

from torch import Tensor
from torch.autograd import forward_ad

from .._autograd.attention import run
from .._backends import reference
from .._backends.dispatch import choose
from .._backends.native.repeat import remember, repeat
from .._call.dropout import DropoutOrigin
from .._call.make import make, make_repeated
from .._call.spec import Bias, Options, Spec, fast_new
from .._tools.arguments import describe
from .._tools.listeners import listeners, notify
from .._tools.watching import in_autocast, is_watched
from .._tools.words import hide_unknown, unknown_keyword
from ..masks import Mask
from .packed import attend_jagged

MAX_WEIGHTS = 2**28


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: Literal[True], impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@hide_unknown
def attention(
    q: Tensor, k: Tensor, v: Tensor, *extra: NoReturn,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, impl: str = "auto",
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Computes exact attention: softmax(cap(scale * q.k) + bias, where the mask allows) times v.

    The steps are applied in this order: scale, softcap (`cap` in the formula), bias, mask, softmax
    (with the sink as one more key), dropout, product with v.

    Args:
        q: queries (..., Hq, Lq, D), (Hq, Lq, D) or (Lq, D) in float64, float32, bfloat16 or
            float16. q, k and v may also be nested tensors (N, Hq, j, D) of layout torch.jagged;
            then the result is nested, too.
        k: keys (..., Hkv, Lk, D) of q's rank and dtype. Hkv divides Hq: query head h reads key head
            h // (Hq / Hkv). Hkv < Hq is grouped-query attention, Hkv = 1 multi-query attention.
        v: values (..., Hkv, Lk, Dv). Batch dims of q, k and v are equal or 1.
        mask: a `regard.masks.Mask`, or a bool tensor broadcastable to (..., Hq, Lq, Lk), True = may
            attend. If q has batch dims, a tensor of three dims raises: write (B, 1, Lq, Lk) or
            (1, Hq, Lq, Lk).
        offset: the position of query 0: query i has position offset + i, key j position j. An int,
            or an integer tensor with one offset for each sample. Default Lk - Lq (bottom-right
            alignment).
        bias: added to the scores. A tensor broadcastable to (..., Hq, Lq, Lk) in q's dtype or
            float32, as for `mask`, `scores.Alibi` or `scores.RelativeBias`. A bias of -inf masks
            the pair.
        scale: multiplies q.k. Default 1 / sqrt(D).
        softcap: replaces a score s by softcap * tanh(s / softcap). Must be above 0.
        sink: (Hq,) logits in q's dtype or float32. The sink takes part in the softmax as one more
            key with a value of zeros.
        dropout: the probability that a weight is set to 0. Others are divided by 1 - dropout.
        seed: the seed of the dropout pattern. Default: drawn from PyTorch's generator, so that
            `torch.manual_seed` works.
        return_lse: whether to return the LSE, too.
        impl: "auto", "native", "torch" or "reference". A named backend is never replaced.

    Returns:
        out (..., Hq, Lq, Dv) with q's dtype and memory order. With `return_lse` also the LSE
        (..., Hq, Lq), the natural logarithm of the softmax's denominator, sink included, in float32
        (float64 for float64). A fully masked row has an output of zeros and an LSE of -inf (with a
        sink: the sink's logit).

    Raises:
        TypeError, ValueError: an argument is invalid. The message names it.
        NotImplementedError: the backend cannot run the call. The message gives the reason and the
            backends that can.

    Example:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> k = v = torch.randn(2, 2, 128, 64)
        >>> regard.attention(q, k, v, mask=masks.Causal()).shape
        torch.Size([2, 8, 128, 64])
    """
    if unknown:
        raise unknown_keyword(attention, unknown)
    if extra:
        raise TypeError(
            f"attention: expected q, k and v by position, got also {describe(extra[0])}; write mask= for a "
            "mask or a bool tensor, bias= for a float tensor"
        )
    options = (mask, offset, bias, scale, softcap, sink, dropout, seed, return_lse)
    return _attend(q, k, v, options, impl)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, values: tuple[Any, ...], impl: str
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `attention` with the values of its Options. A repeated call skips the checks."""
    mask = values[0]
    repeatable = not (listeners or is_watched(q, k, v) or in_autocast() or forward_ad._current_level >= 0)
    if repeatable:
        program = mask.lower() if isinstance(mask, Mask) else mask
        result = repeat(q, k, v, program, *values[1:], impl)
        if result is not None:
            if type(result) is not Spec:
                return result  # type: ignore[no-any-return]
            out, lse = run(make_repeated(result, q, k, v, mask), "native")
            return out if lse is None else (out, lse)
    options = fast_new(Options, values)
    if type(q) is not Tensor and getattr(q, "is_nested", False):
        return attend_jagged(attention, q, k, v, **options._asdict(), impl=impl)
    problem = make(q, k, v, options)
    if listeners:
        notify(q, k, **options.of_weights())
    name = choose(problem, impl)
    out, lse = run(problem, name)
    if repeatable and name == "native":
        remember((q, k, v, program, *values[1:], impl), problem, out, lse)
    return out if lse is None else (out, lse)


def attend_part(
    origin: DropoutOrigin, q: Tensor, k: Tensor, v: Tensor, *, impl: str = "auto", **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `attention` as the part of a larger call, whose dropout pattern it draws."""
    values = Options(**options)
    problem = make(q, k, v, values)
    if listeners:
        notify(q, k, **values.of_weights())
    out, lse = run(problem._replace(origin=origin), choose(problem, impl))
    return out if lse is None else (out, lse)


@hide_unknown
def weights(
    q: Tensor, k: Tensor, v: Tensor, *,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """Computes the matrix of attention weights (..., Hq, Lq, Lk) in q's dtype, for small inputs.

    The arguments are those of `attention`. `weights(...) @ v` equals the output of `attention` if
    Hq = Hkv. Otherwise repeat each head of v Hq / Hkv times first. Without dropout, rows sum to 1,
    or to less with a sink. A fully masked row is all zeros. The reference backend computes the full
    matrix in float64. More than 2**28 weights raise ValueError.

    Example:
        >>> regard.weights(q, k, v, mask=masks.Causal())[0, 0].sum(-1)   # (Lq,) ones
    """
    if unknown:
        raise unknown_keyword(weights, unknown)
    problem = make(q, k, v, Options(mask, offset, bias, scale, softcap, sink, dropout, seed))
    check_weights(problem.spec)
    return reference.weights(problem)


def check_weights(spec: Spec) -> None:
    """Raises ValueError if a call has more than MAX_WEIGHTS weights."""
    if spec.pairs > MAX_WEIGHTS:
        raise ValueError(
            f"weights: expected at most 2**28 = {MAX_WEIGHTS:,} weights, got {spec.pairs:,} of shape "
            f"{spec.weights_shape}; take fewer queries or heads at a time"
        )
