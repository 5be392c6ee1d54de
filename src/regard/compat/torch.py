"""The attention functions of PyTorch, with PyTorch's arguments, computed by Regard."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._api.attention import attention
from ..masks import Causal
from ._flash import FlashOptions, attend_packed

__all__ = ["AuxRequest", "scaled_dot_product_attention", "varlen_attn"]


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Computes `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: (..., Hq, Lq, D). Leading dims of query, key and value broadcast, heads included.
        key: (..., Hkv, Lk, D).
        value: (..., Hkv, Lk, Dv).
        attn_mask: broadcastable to (..., Hq, Lq, Lk): bool, True = may attend, or float, added to
            the scores.
        dropout_p: the probability that a weight is set to 0. The pattern is not PyTorch's.
        is_causal: whether query i attends to keys 0 to i only (top-left alignment). Not allowed
            together with attn_mask.
        scale: multiplies the scores. Default 1 / sqrt(D).
        enable_gqa: whether key and value may have fewer heads than query.

    Returns:
        (..., Hq, Lq, Dv). A fully masked row is zeros, as in PyTorch.
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError(
            "attn_mask, is_causal: expected one of them, got both; "
            "write attn_mask & torch.ones(Lq, Lk, dtype=torch.bool).tril()"
        )
    if not query.is_nested:
        query, key, value = _broadcast(query, key, value, enable_gqa)
    is_bias = attn_mask is not None and attn_mask.dtype.is_floating_point
    return attention(
        query, key, value, mask=Causal() if is_causal else None if is_bias else attn_mask, offset=0,
        bias=attn_mask if is_bias else None, scale=scale, dropout=dropout_p,
    )  # fmt: skip


def _broadcast(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gives q, k and v one rank, and numbers of heads that `attention` takes.

    `attention` itself broadcasts batch dims, and keys and values with one head.
    """
    rank = max(q.ndim, k.ndim, v.ndim)
    q, k, v = (x[(None,) * (rank - x.ndim)] for x in (q, k, v))
    if rank < 3 or q.shape[-3] == k.shape[-3] == v.shape[-3]:
        return q, k, v
    Hq, Hk, Hv = q.shape[-3], k.shape[-3], v.shape[-3]
    if enable_gqa:
        if Hk != Hv:
            k, v = (x.repeat_interleave(Hq // x.shape[-3], -3) for x in (k, v))
        return q, k, v
    H = max(Hq, Hk, Hv)
    if {Hq, Hk, Hv} != {1, H}:
        raise RuntimeError(
            f"key, value: expected as many heads as query, {Hq}, got {Hk} and {Hv}; enable_gqa=True allows "
            "numbers of heads that divide it"
        )
    if Hk != Hv:
        k, v = (x.expand(*x.shape[:-3], H, *x.shape[-2:]) for x in (k, v))
    return q.expand(*q.shape[:-3], H, *q.shape[-2:]), k, v


class AuxRequest(NamedTuple):
    """The auxiliary results that `varlen_attn` returns, as in `torch.nn.attention.varlen`."""

    lse: bool = False


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int,
    max_k: int, *, return_aux: AuxRequest | None = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `torch.nn.attention.varlen.varlen_attn`: attention within packed sequences.

    Args:
        query: (total_q, Hq, D).
        key: (total_k, Hkv, D), or pages (pages, page, Hkv, D) with `block_table`.
        value: like key.
        cu_seq_q: cumulative sequence lengths of the queries, (N + 1,).
        cu_seq_k: those of the keys. Not needed with `seqused_k` and `block_table`.
        max_q: ignored.
        max_k: ignored.
        return_aux: `AuxRequest(lse=True)` returns the LSE (Hq, total_q), too.
        scale: multiplies the scores. Default 1 / sqrt(D).
        window_size: distances to the farthest earlier and later key, -1 is unlimited. (-1, 0) is
            causal, aligned to the bottom right of each sequence.
        enable_gqa: whether key and value may have fewer heads than query.
        seqused_k: the number of keys of each sequence that take part, (N,).
        block_table: the pages of each sequence, (N, max_pages).
        num_splits: ignored. Results never depend on the other sequences.

    Returns:
        (total_q, Hq, D).
    """
    Hq, Hkv = query.shape[1], key.shape[-2]
    if Hq != Hkv and not enable_gqa:
        raise ValueError(
            f"key: expected Hq = {Hq} heads as in query, or a divisor with enable_gqa=True, got {Hkv}"
        )
    if block_table is not None and seqused_k is None:
        raise ValueError("seqused_k: expected the number of keys of each sequence, (N,), with block_table")
    options = FlashOptions(False, window_size, scale, return_lse=return_aux is not None and return_aux.lse)
    result: Tensor | tuple[Tensor, Tensor] = attend_packed(
        query, key, value, cu_seq_q, cu_seq_k, options, used_k=seqused_k, table=block_table
    )
    return result
