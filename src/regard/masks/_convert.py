"""To and from the mask conventions of other libraries. Every docstring says what True means there."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import Offset, describe, holds_integers, readable, tensor_of
from ._atoms import Causal, Dense, Documents, Lengths, Prefix
from ._both import both
from ._mask import And, Mask, Not, Or


class Arguments(NamedTuple):
    """What another library's masks become here: `regard.attention(q, k, v, **arguments._asdict())`."""

    mask: Mask | None = None
    bias: Tensor | None = None
    offset: int | None = None


def from_sdpa(attn_mask: Tensor | None = None, is_causal: bool = False) -> Arguments:
    """From `scaled_dot_product_attention`: bool True = may attend, float = added to the scores.

    `is_causal` there counts from the first query and the first key, so the offset becomes 0.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal exclude each other in scaled_dot_product_attention")
    if is_causal:
        return Arguments(mask=Causal(), offset=0)
    if attn_mask is None:
        return Arguments()
    attn_mask = tensor_of("attn_mask", attn_mask)
    if attn_mask.is_floating_point():
        return Arguments(bias=attn_mask)
    return Arguments(mask=Dense(attn_mask))


def to_sdpa(mask: Mask, Lq: int, Lk: int, offset: Offset = None, heads: int | None = None) -> Tensor:
    """For `scaled_dot_product_attention(attn_mask=...)`: bool, True = may attend."""
    return mask.to_dense(Lq, Lk, offset, heads)


def from_mha(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, heads: int | None = None,
    is_causal: bool = False,
) -> Arguments:  # fmt: skip
    """From `nn.MultiheadAttention`: bool True = may NOT attend, float = added to the scores.

    `attn_mask` is (Lq, Lk), (B * heads, Lq, Lk) with `heads`, or (B, heads or 1, Lq, Lk);
    `key_padding_mask` is (Lk,) or (B, Lk).
    """
    parts: list[Mask | None] = [Causal()] if is_causal else []
    biases: list[Tensor] = []
    if attn_mask is not None:
        shaped = _split_heads(tensor_of("attn_mask", attn_mask), heads)
        biases += [shaped] if shaped.is_floating_point() else []
        parts += [] if shaped.is_floating_point() else [Dense.borrow(~_ignored("attn_mask", shaped))]
    if key_padding_mask is not None:
        key_padding_mask = tensor_of("key_padding_mask", key_padding_mask)
        if key_padding_mask.is_floating_point():
            biases.append(_key_matrix(key_padding_mask))
        else:
            parts.append(padding(~_ignored("key_padding_mask", key_padding_mask)))
    mask = functools.reduce(both, parts, None)
    return Arguments(mask, sum(biases[1:], biases[0]) if biases else None, 0 if is_causal else None)


def to_mha(mask: Mask, batch: int, heads: int, Lq: int, Lk: int, offset: Offset = None) -> Tensor:
    """For `nn.MultiheadAttention(attn_mask=...)`: True = may NOT attend; (Lq, Lk) or (B * heads, Lq, Lk)."""
    dense = mask.to_dense(Lq, Lk, offset, heads)
    if dense.ndim > 2:
        dense = dense.expand(batch, heads, Lq, Lk).reshape(batch * heads, Lq, Lk)
    return ~dense


def from_hf_2d(attention_mask: Tensor) -> Mask:
    """From the (B, L) mask of a tokenizer: 1 or True = real token, 0 = padding, left or right or both."""
    attention_mask = tensor_of("attention_mask", attention_mask)
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must have shape (B, L), got {describe(attention_mask)}")
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError("attention_mask (B, L) must hold 0 (padding) and 1 (real token) only")
    return padding(attention_mask != 0)


def to_hf_2d(mask: Mask, Lk: int) -> Tensor:
    """As (B, Lk) int64, 1 = real token. Only for masks that speak of keys alone, such as Lengths."""
    if not _keys_alone(mask):
        raise ValueError(f"{mask!r} depends on the query or the head; a 2-D attention_mask cannot say that")
    return mask.to_dense(1, Lk).reshape(-1, Lk).to(torch.int64)


def from_hf_4d(attention_mask: Tensor) -> Arguments:
    """From a (B, 1 or Hq, Lq, Lk) mask: bool True = may attend, or float added to the scores.

    A float mask of zeros and the lowest number of its dtype (or -inf) becomes a bool mask; others are a bias.
    """
    attention_mask = tensor_of("attention_mask", attention_mask)
    if attention_mask.ndim != 4:
        came = describe(attention_mask)
        raise ValueError(f"attention_mask must have shape (B, 1 or Hq, Lq, Lk), got {came}")
    if not attention_mask.is_floating_point():
        return Arguments(mask=Dense(attention_mask))
    keep = attention_mask == 0
    excluded = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
    if bool((keep | excluded).all()):
        return Arguments(mask=Dense(keep))
    return Arguments(bias=attention_mask)


def to_hf_4d(
    mask: Mask, Lq: int, Lk: int, offset: Offset = None, *, heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """As (B or 1, 1 or Hq, Lq, Lk): bool with True = may attend, or with `dtype` 0 and finfo(dtype).min."""
    dense = mask.to_dense(Lq, Lk, offset, heads)
    dense = dense[(None,) * (4 - dense.ndim)]
    if dtype is None:
        return dense
    zeros = torch.zeros(dense.shape, dtype=dtype, device=dense.device)
    return zeros.masked_fill(~dense, torch.finfo(dtype).min)


def from_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None) -> Documents:
    """From the (N + 1,) cu_seqlens of packed sequences: 0, n1, n1 + n2, ..., total.

    With one tensor queries and keys are the same tokens, and `& Causal()` is causal attention inside each
    sequence. With two the sequences differ in length, and positions run through the whole pack.
    """
    cu_seqlens_q = tensor_of("cu_seqlens_q", cu_seqlens_q)
    q_ids = _ids("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_k is None:
        return Documents(q_ids)
    cu_seqlens_k = tensor_of("cu_seqlens_k", cu_seqlens_k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must describe equally many sequences, "
            f"got shapes {tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    return Documents(q_ids, _ids("cu_seqlens_k", cu_seqlens_k))


def to_cu_seqlens(mask: Documents) -> tuple[Tensor, Tensor]:
    """The int32 cu_seqlens (N + 1,) of the queries' and the keys' sequences.

    Every id must be contiguous, and the documents in the same order for queries and keys.
    """
    if not isinstance(mask, Documents):
        raise TypeError(f"only a Documents mask has cu_seqlens, got {mask!r}")
    if mask.k_ids is None:
        cu_seqlens = _cu_seqlens(*_segments("q_ids", mask.q_ids))
        return cu_seqlens, cu_seqlens
    q_segments, k_segments = _segments("q_ids", mask.q_ids), _segments("k_ids", mask.k_ids)
    order = _common_order(q_segments[0], k_segments[0])
    return _cu_seqlens(*q_segments, order), _cu_seqlens(*k_segments, order)


def padding(keep: Tensor) -> Mask:
    """Which keys are real, bool (L,) or (B, L), True = real: lengths where they suffice, else Dense.

    Also Dense where values cannot be looked at, as in `torch.compile`.
    """
    keep = tensor_of("keep", keep)
    if not readable(keep):
        return Dense(_key_matrix(keep))
    L = keep.shape[-1]
    at = torch.arange(L, device=keep.device)
    end = torch.where(keep, at + 1, 0).amax(-1) if L else keep.sum(-1)
    start = torch.where(keep, at, L).amin(-1).minimum(end) if L else end
    if not torch.equal(end - start, keep.sum(-1)):
        return Dense(_key_matrix(keep))
    if not bool((start > 0).any()):
        return Lengths(end)
    return ~Lengths(start) if bool((end == L).all()) else Lengths(end) & ~Lengths(start)


def _key_matrix(x: Tensor) -> Tensor:
    """(Lk,) -> (1, Lk), (B, Lk) -> (B, 1, 1, Lk)."""
    return x[..., None, None, :] if x.ndim > 1 else x[None, :]


def _split_heads(attn_mask: Tensor, heads: int | None) -> Tensor:
    if attn_mask.ndim in (2, 4):
        return attn_mask
    if attn_mask.ndim != 3 or heads is None or attn_mask.shape[0] % heads:
        raise ValueError(
            "attn_mask must have shape (Lq, Lk), (B, heads, Lq, Lk), or (B * heads, Lq, Lk) with `heads` "
            f"given, got {describe(attn_mask)} and heads = {heads}"
        )
    return attn_mask.reshape(-1, heads, *attn_mask.shape[-2:])


def _ignored(name: str, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be bool (True = may not attend) or float (added), got {describe(mask)}")
    return mask


def _keys_alone(mask: Mask) -> bool:
    if isinstance(mask, (And, Or, Not)):
        return all(_keys_alone(child) for child in mask._children())
    if isinstance(mask, Dense):
        return mask.keep.shape[-2] == 1 and math.prod(mask.keep.shape[-3:-2]) == 1
    return isinstance(mask, (Lengths, Prefix))


def _ids(name: str, cu_seqlens: Tensor) -> Tensor:
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or not holds_integers(cu_seqlens):
        raise ValueError(f"{name} must be integers of shape (N + 1,), got {describe(cu_seqlens)}")
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name} must start with 0 and not decrease, got {cu_seqlens.tolist()}")
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths.long())


def _segments(name: str, ids: Tensor) -> tuple[list[int], list[int]]:
    """The ids of (L,) in order of appearance and how many tokens each has."""
    if math.prod(ids.shape[:-1]) != 1:
        raise ValueError(f"cu_seqlens describe one packed row, but {name} has shape {tuple(ids.shape)}")
    values, sizes = torch.unique_consecutive(ids.flatten(), return_counts=True)
    if len(values) != len(torch.unique(values)):
        raise ValueError(f"cu_seqlens need contiguous documents, but an id of {name} comes back later")
    return values.tolist(), sizes.tolist()


def _common_order(q_docs: list[int], k_docs: list[int]) -> list[int]:
    if q_docs == k_docs:
        return k_docs
    if q_docs == sorted(q_docs) and k_docs == sorted(k_docs):
        return sorted({*q_docs, *k_docs})
    raise ValueError(f"cu_seqlens need the same order of documents for queries {q_docs} and keys {k_docs}")


def _cu_seqlens(docs: list[int], sizes: list[int], order: list[int] | None = None) -> Tensor:
    size_of = dict(zip(docs, sizes, strict=True))
    lengths = [size_of.get(doc, 0) for doc in (docs if order is None else order)]
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
