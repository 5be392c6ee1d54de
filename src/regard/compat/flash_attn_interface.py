"""The functions of flash-attn 3's `flash_attn_interface`, with its arguments, computed by Regard.

The options are described in `regard.compat.flash_attn`. Version 3 has no dropout and no ALiBi.
`attention_chunk` > 0 restricts attention to pairs within the same `attention_chunk` positions.
`deterministic`, `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` are ignored. `qv` and
the scales of float8 tensors raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._api.merge import merge
from .._tools.arguments import describe
from ._flash import UNLIMITED, FlashOptions, Result, attend, attend_packed
from ._flash_cache import cache_of, decode, decode_packed, rotary_of

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_with_kvcache", "get_scheduler_metadata",
]  # fmt: skip


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Sequence[int] = UNLIMITED, attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Computes attention of q (B, Lq, Hq, D), k (B, Lk, Hkv, D) and v (B, Lk, Hkv, Dv).

    Returns (B, Lq, Hq, Dv), and with `return_attn_probs` the LSE (B, Hq, Lq).
    """
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return attend(
        q, k, v, _options(causal, window_size, softmax_scale, softcap, attention_chunk, return_attn_probs)
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Sequence[int] = UNLIMITED, attention_chunk: int = 0, softcap: float = 0.0,
    deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Computes `flash_attn_func` of qkv (B, L, 3, H, D), or (B, L, Hq + 2 * Hkv, D).

    The second form needs `num_heads_q`, Hq.
    """
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if qkv.ndim == 5:
        q, k, v = qkv.unbind(2)
    elif num_heads_q is None:
        raise ValueError("num_heads_q: expected the number of query heads with qkv (B, L, H, D), got None")
    else:
        Hkv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, Hkv, Hkv], 2)
    return attend(
        q, k, v, _options(causal, window_size, softmax_scale, softcap, attention_chunk, return_attn_probs)
    )


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Sequence[int] = UNLIMITED, attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Computes attention within each sequence of packed q (total_q, Hq, D), k and v (total_k, ...).

    `seqused_q` and `seqused_k` (N,) are the numbers of queries and keys of each sequence that take
    part. The results of other queries are zeros.

    Returns (total_q, Hq, Dv), and with `return_attn_probs` the LSE (Hq, total_q).
    """
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = _options(causal, window_size, softmax_scale, softcap, attention_chunk, return_attn_probs)
    return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, options, used_q=seqused_q, used_k=seqused_k)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges partial results (splits, B, L, H, D) and their LSE (splits, B, L, H)."""
    merged, lse = merge(out_partial, lse_partial)
    merged = merged if out_dtype is None else merged.to(out_dtype)
    return merged if out is None else out.copy_(merged), lse


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = UNLIMITED,
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
    """Writes new keys and values to a cache, in place, and attends to the cache. No gradients.

    The arguments are those of `regard.compat.flash_attn.flash_attn_with_kvcache`, with `page_table`
    for its `block_table`. `rotary_seqlens` (B,) replaces `cache_seqlens` as the position of the
    first new token. With `cu_seqlens_q` (B + 1,), q is packed, (total_q, Hq, D), and so are k and v
    with `cu_seqlens_k_new` (B + 1,). `return_softmax_lse` returns out, the LSE, and two empty tensors
    in place of the partial results of splits.
    """
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = _options(causal, window_size, softmax_scale, softcap, attention_chunk, return_softmax_lse)
    cache = cache_of(k_cache, v_cache, cache_seqlens, cache_leftpad, page_table)
    start = cache.length if rotary_seqlens is None else rotary_seqlens
    rotary = rotary_of(rotary_cos, rotary_sin, start, rotary_interleaved)
    call = (q, cache, (k, v), options, rotary, cache_batch_idx)
    result = decode(*call) if cu_seqlens_q is None else decode_packed(*call, cu_seqlens_q, cu_seqlens_k_new)
    return (*result, q.new_empty(0), q.new_empty(0)) if return_softmax_lse else result


def get_scheduler_metadata(*args: Any, **options: Any) -> None:
    """Returns None: Regard needs no scheduler metadata."""


def _options(
    causal: bool, window: Sequence[int], scale: float | None, softcap: float, chunk: int, return_lse: bool
) -> FlashOptions:
    return FlashOptions(causal, window, scale, softcap, chunk=chunk, return_lse=return_lse)


def _refuse(**arguments: Tensor | None) -> None:
    for name, value in arguments.items():
        if value is not None:
            hint = (
                "regard.nn.LatentAttention has latent queries" if name == "qv" else "float8 is not supported"
            )
            raise NotImplementedError(f"{name}: expected None, got {describe(value)}; {hint}")
