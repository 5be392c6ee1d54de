"""Conversion of masks from and to the conventions of other libraries.

Each docstring states what True means in the other library. `cu_seqlens` (N + 1,), the cumulative
sequence lengths, are 0, n1, n1 + n2, ..., total.
"""

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
    """Arguments of `attention`, to be passed as `attention(q, k, v, **arguments._asdict())`."""

    mask: Mask | None = None
    bias: Tensor | None = None
    offset: int | None = None


def from_sdpa(attn_mask: Tensor | None = None, is_causal: bool = False) -> Arguments:
    """Converts the mask arguments of `scaled_dot_product_attention`.

    Args:
        attn_mask: broadcastable to (..., Hq, Lq, Lk). Bool, True = may attend, or float, which is
            added to the scores. With batch dims, write (Hq, Lq, Lk) as (1, Hq, Lq, Lk). Must be
            None with `is_causal`.
        is_causal: whether to use a causal mask, aligned to the top left (offset 0 in the result).
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal: expected at most one of them, got both")
    if is_causal:
        return Arguments(mask=Causal(), offset=0)
    if attn_mask is None:
        return Arguments()
    attn_mask = tensor_of("attn_mask", attn_mask)
    if attn_mask.is_floating_point():
        return Arguments(bias=attn_mask)
    return Arguments(mask=Dense(attn_mask))


def to_sdpa(mask: Mask, Lq: int, Lk: int, offset: Offset = None, heads: int | None = None) -> Tensor:
    """Returns the `attn_mask` of `scaled_dot_product_attention`: bool, True = may attend."""
    return mask.to_dense(Lq, Lk, offset, heads)


def from_mha(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, heads: int | None = None,
    is_causal: bool = False,
) -> Arguments:  # fmt: skip
    """Converts the mask arguments of `nn.MultiheadAttention`, where True = may NOT attend.

    Args:
        attn_mask: (Lq, Lk), (B, heads or 1, Lq, Lk), or (B * heads, Lq, Lk) together with `heads`.
            Bool, or float, which is added to the scores. A float mask of zeros and ones raises,
            because it is probably meant as a bool mask.
        key_padding_mask: (Lk,) or (B, Lk), bool or float.
        heads: the number of heads.
        is_causal: whether to add a causal mask, aligned to the top left (offset 0 in the result).
    """
    masks: list[Mask | None] = [Causal()] if is_causal else []
    biases: list[Tensor] = []
    if attn_mask is not None:
        shaped = _split_heads(tensor_of("attn_mask", attn_mask), heads)
        biases += [_checked_float("attn_mask", shaped)] if shaped.is_floating_point() else []
        masks += [] if shaped.is_floating_point() else [Dense.borrow(~_checked_bool("attn_mask", shaped))]
    if key_padding_mask is not None:
        key_padding_mask = tensor_of("key_padding_mask", key_padding_mask)
        if key_padding_mask.is_floating_point():
            biases.append(_key_matrix(_checked_float("key_padding_mask", key_padding_mask)))
        else:
            masks.append(padding(~_checked_bool("key_padding_mask", key_padding_mask)))
    mask = functools.reduce(both, masks, None)
    return Arguments(mask, sum(biases[1:], biases[0]) if biases else None, 0 if is_causal else None)


def to_mha(mask: Mask, batch: int, heads: int, Lq: int, Lk: int, offset: Offset = None) -> Tensor:
    """Returns the `attn_mask` of `nn.MultiheadAttention`: bool, True = may NOT attend.

    The shape is (Lq, Lk), or (B * heads, Lq, Lk) if the mask differs between heads or samples.
    """
    dense = mask.to_dense(Lq, Lk, offset, heads)
    if dense.ndim > 2:
        dense = dense.expand(batch, heads, Lq, Lk).reshape(batch * heads, Lq, Lk)
    return ~dense


def from_hf_2d(attention_mask: Tensor) -> Mask:
    """Converts a tokenizer's attention_mask (B, L): 1 or True = real token, 0 = padding."""
    attention_mask = tensor_of("attention_mask", attention_mask)
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask: expected shape (B, L), got {describe(attention_mask)}")
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError("attention_mask: expected 0 (padding) or 1 (real token), got other values")
    return padding(attention_mask != 0)


def to_hf_2d(mask: Mask, Lk: int) -> Tensor:
    """Returns an attention_mask (B, Lk) int64, 1 = real token.

    The mask must depend only on the sample and the key, as `Lengths` does.
    """
    if not _depends_on_keys_only(mask):
        raise ValueError(f"mask: expected one that does not depend on the query or the head, got {mask!r}")
    return mask.to_dense(1, Lk).reshape(-1, Lk).to(torch.int64)


def from_hf_4d(attention_mask: Tensor) -> Arguments:
    """Converts a 4-D attention_mask (B, 1 or Hq, Lq, Lk): bool, True = may attend, or float.

    A float mask that holds only zeros and -inf (or the dtype's minimum) becomes a `Dense` mask. Any
    other float mask becomes a bias.
    """
    attention_mask = tensor_of("attention_mask", attention_mask)
    if attention_mask.ndim != 4:
        got = describe(attention_mask)
        raise ValueError(f"attention_mask: expected shape (B, 1 or Hq, Lq, Lk), got {got}")
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
    """Returns a 4-D attention_mask (B or 1, 1 or Hq, Lq, Lk): bool, True = may attend.

    With `dtype`, returns a float mask: 0 = may attend, finfo(dtype).min = may not attend.
    """
    dense = mask.to_dense(Lq, Lk, offset, heads)
    dense = dense[(None,) * (4 - dense.ndim)]
    if dtype is None:
        return dense
    zeros = torch.zeros(dense.shape, dtype=dtype, device=dense.device)
    return zeros.masked_fill(~dense, torch.finfo(dtype).min)


def from_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None) -> Documents:
    """Returns the mask of packed sequences: each query may attend to the keys of its own sequence.

    Positions are counted from the start of the packed row, not of each sequence. So `& Causal()` is
    causal attention within each sequence only if queries and keys are the same tokens.

    Args:
        cu_seqlens_q: integers (N + 1,).
        cu_seqlens_k: integers (N + 1,). Default: cu_seqlens_q, for queries and keys of the same
            tokens.
    """
    cu_seqlens_q = tensor_of("cu_seqlens_q", cu_seqlens_q)
    q_ids = _ids("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_k is None:
        return Documents(q_ids)
    cu_seqlens_k = tensor_of("cu_seqlens_k", cu_seqlens_k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k: expected the shape of cu_seqlens_q {tuple(cu_seqlens_q.shape)}, "
            f"got {tuple(cu_seqlens_k.shape)}"
        )
    return Documents(q_ids, _ids("cu_seqlens_k", cu_seqlens_k))


def to_cu_seqlens(mask: Documents) -> tuple[Tensor, Tensor]:
    """Converts a `Documents` mask to the cu_seqlens (N + 1,) int32 of the queries and of the keys.

    The tokens of a document must be contiguous, and queries and keys must have the documents in the
    same order.
    """
    if not isinstance(mask, Documents):
        raise TypeError(f"mask: expected Documents, got {mask!r}")
    if mask.k_ids is None:
        cu_seqlens = _cu_seqlens(*_segments("q_ids", mask.q_ids))
        return cu_seqlens, cu_seqlens
    q_segments, k_segments = _segments("q_ids", mask.q_ids), _segments("k_ids", mask.k_ids)
    order = _common_order(q_segments[0], k_segments[0])
    return _cu_seqlens(*q_segments, order), _cu_seqlens(*k_segments, order)


def padding(keep: Tensor) -> Mask:
    """Returns a mask that excludes padding. `keep` is bool (L,) or (B, L), True = real token.

    If the real tokens of each sample are contiguous, the result is a combination of `Lengths`.
    Otherwise, or if values cannot be read (`torch.compile`), the result is `Dense`.
    """
    keep = tensor_of("keep", keep)
    if not readable(keep):
        return Dense(_key_matrix(keep))
    L = keep.shape[-1]
    index = torch.arange(L, device=keep.device)
    end = torch.where(keep, index + 1, 0).amax(-1) if L else keep.sum(-1)
    start = torch.where(keep, index, L).amin(-1).minimum(end) if L else end
    if not torch.equal(end - start, keep.sum(-1)):
        return Dense(_key_matrix(keep))
    if not bool((start > 0).any()):
        return Lengths(end)
    return ~Lengths(start) if bool((end == L).all()) else Lengths(end) & ~Lengths(start)


def _key_matrix(x: Tensor) -> Tensor:
    """Inserts dims for heads and queries: (Lk,) -> (1, Lk), (B, Lk) -> (B, 1, 1, Lk)."""
    return x[..., None, None, :] if x.ndim > 1 else x[None, :]


def _split_heads(attn_mask: Tensor, heads: int | None) -> Tensor:
    if attn_mask.ndim in (2, 4):
        return attn_mask
    if attn_mask.ndim != 3 or heads is None or attn_mask.shape[0] % heads:
        raise ValueError(
            "attn_mask: expected shape (Lq, Lk), (B, heads, Lq, Lk), or (B * heads, Lq, Lk) with `heads`, "
            f"got {describe(attn_mask)} and heads = {heads}"
        )
    return attn_mask.reshape(-1, heads, *attn_mask.shape[-2:])


def _checked_bool(name: str, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        got = describe(mask)
        raise TypeError(f"{name}: expected bool (True = may not attend) or float (added), got {got}")
    return mask


def _checked_float(name: str, mask: Tensor) -> Tensor:
    """Returns a float mask. Raises ValueError if all entries are 0 or 1 and at least one is 1.

    A mask that requires grad is not checked: it is a learned bias, whose entries may be 0 or 1.
    """
    if mask.requires_grad or not readable(mask):
        return mask
    ones = mask
    for rows in (torch.atleast_2d(mask)[..., :1, :], mask):  # early exit: most masks differ in row 0
        ones = rows == 1
        if not torch.equal(ones, rows != 0):
            return mask
    if bool(ones.any()):
        raise ValueError(
            f"{name}: expected a bool tensor (True = may not attend) or floats to add to the scores, got "
            f"floats that are all zeros and ones, which mask nothing; write {name}.bool() if 1 means 'may "
            f"not attend', {name} == 0 if 1 means 'may attend'"
        )
    return mask


def _depends_on_keys_only(mask: Mask) -> bool:
    if isinstance(mask, (And, Or, Not)):
        return all(_depends_on_keys_only(child) for child in mask._children())
    if isinstance(mask, Dense):
        return mask.keep.shape[-2] == 1 and math.prod(mask.keep.shape[-3:-2]) == 1
    return isinstance(mask, (Lengths, Prefix))


def _ids(name: str, cu_seqlens: Tensor) -> Tensor:
    """Returns the index of each token's sequence, (total,)."""
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or not holds_integers(cu_seqlens):
        raise ValueError(f"{name}: expected integers of shape (N + 1,), got {describe(cu_seqlens)}")
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name}: expected to start with 0 and not decrease, got {cu_seqlens.tolist()}")
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths.long())


def _segments(name: str, ids: Tensor) -> tuple[list[int], list[int]]:
    """Returns the document ids in order of appearance, and each document's number of tokens."""
    if math.prod(ids.shape[:-1]) != 1:
        raise ValueError(f"{name}: expected one row of packed sequences, got shape {tuple(ids.shape)}")
    values, sizes = torch.unique_consecutive(ids.flatten(), return_counts=True)
    if len(values) != len(torch.unique(values)):
        raise ValueError(f"{name}: expected contiguous documents, got an id that comes back later")
    return values.tolist(), sizes.tolist()


def _common_order(q_docs: list[int], k_docs: list[int]) -> list[int]:
    """Returns all documents in an order that agrees with both the queries' and the keys' order."""
    if q_docs == k_docs:
        return k_docs
    if q_docs == sorted(q_docs) and k_docs == sorted(k_docs):
        return sorted({*q_docs, *k_docs})
    raise ValueError(f"k_ids: expected the same order of documents as q_ids {q_docs}, got {k_docs}")


def _cu_seqlens(docs: list[int], sizes: list[int], order: list[int] | None = None) -> Tensor:
    size_of = dict(zip(docs, sizes, strict=True))
    lengths = [size_of.get(doc, 0) for doc in (docs if order is None else order)]
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
