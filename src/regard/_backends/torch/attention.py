"""Attention by PyTorch: SDPA if it supports the options of the call, else FlexAttention.

This backend runs calls on a GPU, and on a CPU with impl="torch". It computes the same function as
the other backends, but gives only the guarantees of PyTorch's kernels (docs/attention.md).

SDPA draws dropout from PyTorch's generator. The generator is seeded for the call and restored
afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import masks
from ..._call.layout import dense_bias, dense_mask, heads_4d, restore_out
from ..._call.spec import Problem
from ...scores import Alibi

INF = float("inf")
CAUSAL = masks.Causal().lower().code


def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns why neither SDPA nor FlexAttention can run the problem, or () if one of them can."""
    sdpa, flex = sdpa_reasons(problem), flex_reasons(problem)
    return (*(f"SDPA: {r}" for r in sdpa), *(f"FlexAttention: {r}" for r in flex)) if sdpa and flex else ()


def kernel(problem: Problem) -> str:
    """Returns which kernel runs the problem: "sdpa" or "flex"."""
    if sdpa_reasons(problem):
        return "flex"
    return "flex" if _flex_is_better(problem) and not flex_reasons(problem) else "sdpa"


def forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Computes out (..., Hq, Lq, Dv) in q's dtype, and the LSE (..., Hq, Lq) or None."""
    return _flex(problem) if kernel(problem) == "flex" else (_sdpa(problem), None)


def sdpa_reasons(problem: Problem) -> tuple[str, ...]:
    spec = problem.spec
    unsupported = (("softcap", spec.softcap is not None), ("a sink", spec.sink), ("the LSE", spec.return_lse))
    return tuple(f"does not support {name}" for name, used in unsupported if used)


def flex_reasons(problem: Problem) -> tuple[str, ...]:
    obstacles = ["has no dropout"] if problem.spec.dropout else []
    if problem.needs_grad and problem.spec.device.type == "cpu":
        obstacles.append("has no backward on CPU")
    return tuple(obstacles)


def _flex_is_better(problem: Problem) -> bool:
    """Returns whether FlexAttention avoids an n x n mask or bias that SDPA would need on a GPU."""
    spec = problem.spec
    structured = spec.bias in ("alibi", "relative") or _simple_mask(problem) is None
    return spec.device.type == "cuda" and structured


def _qkv(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    spec = problem.spec
    return heads_4d(spec, problem.q), heads_4d(spec, problem.k), heads_4d(spec, problem.v)


# SDPA


def _sdpa(problem: Problem) -> Tensor:
    spec = problem.spec
    mask = _additive_mask(problem) if needs_dense_mask(problem) else None
    q, k, v = _qkv(problem)
    with _seeded(problem) if spec.dropout else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, mask, spec.dropout, is_causal=mask is None and _simple_mask(problem) == "causal",
            scale=spec.scale, enable_gqa=spec.Hq != spec.Hkv,
        )  # fmt: skip
    if mask is not None:  # fully masked rows become zeros
        visible = mask if mask.dtype is torch.bool else mask != -INF
        out = torch.where(visible.any(-1, keepdim=True), out, 0.0)
    return restore_out(spec, out)


def needs_dense_mask(problem: Problem) -> bool:
    """Returns whether SDPA needs an n x n mask tensor, as for a bias and for most masks."""
    return problem.spec.bias != "none" or _simple_mask(problem) is None


def _simple_mask(problem: Problem) -> str | None:
    """Returns "none" or "causal" if SDPA needs no mask tensor, else None."""
    spec = problem.spec
    if not spec.code:
        return "none"
    if spec.code != CAUSAL or spec.offset is None:
        return None
    if spec.offset >= spec.Lk - 1:  # causal, but even the first query may attend to every key
        return "none"
    return "causal" if spec.offset == 0 else None


def _additive_mask(problem: Problem) -> Tensor:
    """Combines mask and bias into one tensor that broadcasts to (B, Hq, Lq, Lk).

    The tensor is bool without a bias, else float with -inf for masked pairs.
    """
    spec = problem.spec
    keep, bias = dense_mask(problem), dense_bias(problem, spec.bias_dtype or spec.lse_dtype)
    if bias is None:
        assert keep is not None
        return keep
    bias = bias if keep is None else torch.where(keep, bias, -INF)
    return bias.expand(-1, -1, spec.Lq, spec.Lk)


@contextlib.contextmanager
def _seeded(problem: Problem) -> Iterator[None]:
    """Seeds PyTorch's generator for a `with` block and restores it afterwards."""
    device = problem.spec.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(problem.seed))
        yield


# FlexAttention


def _flex(problem: Problem) -> tuple[Tensor, Tensor | None]:
    spec = problem.spec
    out, lse = _flex_without_sink(problem)
    if problem.sink is not None:
        sink = problem.sink.to(lse.dtype).view(1, spec.Hq, 1)
        share = torch.where(lse == -INF, 0.0, torch.sigmoid(lse - sink))
        out, lse = out * share[..., None].to(out.dtype), torch.logaddexp(lse, sink)
    return restore_out(spec, out), lse.to(spec.lse_dtype).reshape(spec.lse_shape) if spec.return_lse else None


def _flex_without_sink(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes out (B, Hq, Lq, Dv) and the LSE (B, Hq, Lq), ignoring the sink."""
    spec = problem.spec
    q, k, v = _qkv(problem)
    if 0 in (spec.B, spec.Hq, spec.Lq, spec.Lk):
        out = q.new_zeros(spec.B, spec.Hq, spec.Lq, spec.Dv)
        return out, torch.full(out.shape[:3], -INF, dtype=spec.lse_dtype, device=spec.device)
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = _flex_function(spec.device.type)(
        q, k, v, score_mod=_score_mod(problem), block_mask=_block_mask(problem), scale=spec.scale,
        enable_gqa=spec.Hq != spec.Hkv, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


@functools.cache
def _flex_function(device: str) -> Callable[..., Any]:
    """Returns `flex_attention`, compiled on a GPU.

    On a CPU the function is not compiled. It then needs n x n memory, but no compiler, and supports
    every dtype and option.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cpu":
        return torch.compile(flex_attention, dynamic=True)

    def eager(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*args, **options)

    return eager


def _score_mod(problem: Problem) -> Callable[..., Tensor] | None:
    """Returns a FlexAttention `score_mod` for softcap and bias, or None if the call has neither."""
    cap, bias = problem.spec.softcap, _bias_at(problem)
    if cap is None and bias is None:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + bias(b, h, i, j)

    return modify


def _bias_at(problem: Problem) -> Callable[..., Tensor] | None:
    """Returns a function (b, h, i, j) -> bias, or None if the call has no bias.

    The function computes ALiBi, and looks up any other bias in a tensor.
    """
    spec, bias = problem.spec, problem.bias
    if isinstance(bias, Alibi):
        slopes, offset = bias.slopes, problem.offset
        if offset is None:
            return lambda b, h, i, j: -slopes[h] * (spec.offset + i - j).abs()
        return lambda b, h, i, j: -slopes[h] * (offset[b] + i - j).abs()
    dense = dense_bias(problem, spec.lse_dtype)
    if dense is None:
        return None
    table = dense.expand(spec.B, spec.Hq, spec.Lq, spec.Lk)
    return lambda b, h, i, j: table[b, h, i, j]


def _block_mask(problem: Problem) -> Any:
    """Returns the mask as a FlexAttention BlockMask, or None if the call has no mask."""
    if problem.mask is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    spec = problem.spec
    offset = spec.offset if problem.offset is None else problem.offset
    mod = masks.to_flex_mask_mod(problem.mask, spec.Lq, spec.Lk, offset, batch=spec.batch, device=spec.device)
    return create_block_mask(mod, spec.B, spec.Hq, spec.Lq, spec.Lk, device=spec.device)
