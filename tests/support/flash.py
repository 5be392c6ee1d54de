"""A reference of flash-attn's functions in float64, written from the definition, one row at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: Sequence[int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    chunk: int = 0, first: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns out (Lq, Hq, Dv) and the LSE (Hq, Lq) of one sample q (Lq, Hq, D), k, v (Lk, Hkv, D).

    Query i attends to the keys j >= first whose distance from i + Lk - Lq is within the window.
    """
    (Lq, Hq, D), (Lk, Hkv, _) = q.shape, k.shape
    k, v = (x.double().repeat_interleave(Hq // Hkv, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * (
        D**-0.5 if softmax_scale is None else softmax_scale
    )
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    p, j = torch.arange(Lq)[:, None] + Lk - Lq, torch.arange(Lk)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (p - j).abs()
    left, right = window_size
    keep = (j >= first).expand(Lq, Lk)
    keep = keep & (j <= p) if causal else keep
    keep = keep & (j >= p - left) if left >= 0 else keep
    keep = keep & (j <= p + right) if right >= 0 else keep
    keep = keep & (j // chunk == p // chunk) if chunk else keep
    scores = scores.masked_fill(~keep, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True).nan_to_num(0, 0, 0) if Lk else scores.new_zeros(Hq, Lq, 1)
    masses = (scores - top).exp()
    total = masses.sum(-1, keepdim=True)
    weights = masses / total.masked_fill(total == 0, 1)
    return torch.einsum("hij,jhd->ihd", weights, v), (top + total.log()).squeeze(-1)


def packed_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: Sequence[int], lengths_k: Sequence[int],
    alibi_slopes: Tensor | None = None, **options: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns out (total_q, Hq, Dv) and the LSE (Hq, total_q) of packed sequences."""
    parts = zip(q.split(list(lengths_q)), k.split(list(lengths_k)), v.split(list(lengths_k)), strict=True)
    results = [
        reference(*part, alibi_slopes=slopes_of(alibi_slopes, s), **options)  # type: ignore[arg-type]
        for s, part in enumerate(parts)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def padded_reference(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None, **options: object
) -> tuple[Tensor, Tensor]:
    """Returns out (B, Lq, Hq, Dv) and the LSE (B, Hq, Lq) of a batch."""
    results = [
        reference(q[b], k[b], v[b], alibi_slopes=slopes_of(alibi_slopes, b), **options)  # type: ignore[arg-type]
        for b in range(len(q))
    ]
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs), torch.stack(lses)


def slopes_of(slopes: Tensor | None, b: int) -> Tensor | None:
    return slopes[b] if slopes is not None and slopes.ndim == 2 else slopes


def rotation(
    x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool, advance: bool = True
) -> Tensor:
    """Rotates x (L, H, D) at positions start, start + 1, ... by complex multiplication in float64."""
    half = cos.shape[-1]
    at = start + torch.arange(len(x)) * advance
    turn = torch.complex(cos.double()[at], sin.double()[at])[:, None]
    rest, x = x[..., 2 * half :].double(), x[..., : 2 * half].double()
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2), rest], -1)


def signature(function: Callable[..., Any]) -> str:
    """Returns the parameters of a function and their defaults, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return " ".join(str(p.replace(annotation=p.empty)).replace(" ", "") for p in parameters)
