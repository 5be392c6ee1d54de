"""The verb: exact attention behind one call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .._autograd.attention import run
from .._backends import reference
from .._backends.dispatch import choose
from .._call.make import make
from .._call.spec import Bias, Options, fast_new
from .._tools.listeners import listeners, tell
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


def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention: softmax(cap(scale * q.k) + bias, where the mask allows) times v.

    A score passes through scale, softcap, bias, mask, softmax with sink, dropout, in this order.

    Args:
        q: queries (..., Hq, Lq, D), or (Hq, Lq, D), or (Lq, D). float64, float32, bfloat16 or float16.
            Or, with k and v, a nested tensor (N, Hq, j, D) of layout torch.jagged, and so is the result.
        k: keys (..., Hkv, Lk, D) of the same rank and dtype. Hkv divides Hq: query head h reads key head
            h // (Hq / Hkv), so Hkv < Hq is grouped-query and Hkv = 1 multi-query attention.
        v: values (..., Hkv, Lk, Dv). Batch dims of q, k and v are equal or 1.
        mask: a `regard.masks.Mask`, or a bool tensor broadcastable to (..., Hq, Lq, Lk); True = may attend.
        offset: the position of query 0 among the keys: query i stands at offset + i, key j at j. An int, or
            an integer tensor with one position for each sample. Default Lk - Lq: the last query meets the
            last key.
        bias: added to the scores: a tensor broadcastable to (..., Hq, Lq, Lk) in q's dtype or float32,
            `scores.Alibi` or `scores.RelativeBias`. A bias of -inf excludes the key.
        scale: multiplies q.k. Default 1 / sqrt(D).
        softcap: replaces a score s by softcap * tanh(s / softcap). Above 0.
        sink: (Hq,) logits in q's dtype or float32 that take probability and give nothing.
        dropout: the probability, from 0 to 1, that a weight is set to 0; others are divided by 1 - dropout.
        seed: keys the dropout pattern. Default: drawn from PyTorch's generator, so `torch.manual_seed` works.
        return_lse: also return the LSE.
        impl: "auto", "native", "torch" or "reference". A backend asked for by name never falls back.

    Returns:
        out (..., Hq, Lq, Dv) with q's dtype and memory order; with `return_lse` also the LSE (..., Hq, Lq),
        the natural logarithm of the softmax's denominator, sink included, in float32 (float64 for float64).
        A query that may attend to nothing gives zeros and an LSE of -inf (with a sink: the sink).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        NotImplementedError: the backend cannot run this call; the message says why and what can.

    Example:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> k = v = torch.randn(2, 2, 128, 64)
        >>> regard.attention(q, k, v, mask=masks.Causal()).shape
        torch.Size([2, 8, 128, 64])
    """
    options = fast_new(Options, (mask, offset, bias, scale, softcap, sink, dropout, seed, return_lse))
    if type(q) is not Tensor and getattr(q, "is_nested", False):
        return attend_jagged(attention, q, k, v, **options._asdict(), impl=impl)
    problem = make(q, k, v, options)
    if listeners:
        tell(q, k, **options.of_weights())
    out, lse = run(problem, choose(problem, impl))
    return out if lse is None else (out, lse)


def weights(
    q: Tensor, k: Tensor, v: Tensor, *,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The matrix of weights, (..., Hq, Lq, Lk) in q's dtype, for small inputs.

    The arguments mean what they mean for `attention`, and `weights(...) @ v` is its output when Hq = Hkv
    (else repeat each head of v Hq / Hkv times). Rows sum to 1, less with a sink; a row that sees nothing is
    zeros.
    Computed in float64 from the formula, with the whole matrix in memory; above 2**28 weights it refuses.

    Example:
        >>> regard.weights(q, k, v, mask=masks.Causal())[0, 0].sum(-1)   # (Lq,) ones
    """
    problem = make(q, k, v, Options(mask, offset, bias, scale, softcap, sink, dropout, seed))
    spec = problem.spec
    if spec.pairs > MAX_WEIGHTS:
        raise ValueError(
            f"weights: expected at most 2**28 = {MAX_WEIGHTS:,} weights, got {spec.pairs:,} of shape "
            f"{spec.weights_shape}; take fewer queries or heads at a time"
        )
    return reference.weights(problem)
