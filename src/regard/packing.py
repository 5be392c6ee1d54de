"""Packed sequences: N sequences concatenated in one row of `total` tokens, without padding.

`cu_seqlens` (N + 1,), the cumulative sequence lengths, are 0, n1, n1 + n2, ..., total. Positions
start at 0 in every sequence. A sequence may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn, overload

import torch
from torch import Tensor

from ._api.attention import attention
from ._api.packed import attend_packed
from ._call.spec import Bias
from ._tools.arguments import count, describe, holds_integers, tensor_of
from ._tools.words import hide_unknown, unknown_keyword
from .masks import Causal, Mask, Window, from_cu_seqlens
from .masks._both import both

__all__ = ["cu_seqlens", "lengths", "pack", "positions", "unpack", "varlen_attention"]

Integers = Tensor | Sequence[int]
Reach = int | None


# cu_seqlens


def cu_seqlens(lengths: Integers | None = None, *, keep: Tensor | None = None) -> Tensor:
    """Returns the cu_seqlens (N + 1,) int32 of packed sequences.

    Args:
        lengths: integers (N,).
        keep: instead of lengths, bool (N, L): True = real token, False = padding.

    Example:
        >>> packing.cu_seqlens([3, 0, 2])
        tensor([0, 3, 3, 5], dtype=torch.int32)
    """
    counts = _counts(lengths, keep)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def lengths(cu_seqlens: Integers) -> Tensor:
    """Returns the lengths (N,) of the sequences."""
    return _checked_cu_seqlens(cu_seqlens)[0].diff()


def positions(cu_seqlens: Integers) -> Tensor:
    """Returns the position of each token within its sequence, (total,) int64.

    Example:
        >>> packing.positions([0, 3, 3, 5])
        tensor([0, 1, 2, 0, 1])
    """
    starts, ids = _checked_cu_seqlens(cu_seqlens)
    return torch.arange(len(ids), device=ids.device) - starts[ids]


def _checked_cu_seqlens(cu_seqlens: Integers) -> tuple[Tensor, Tensor]:
    """Checks cu_seqlens. Returns it as a tensor, and each token's sequence index, (total,)."""
    tensor = tensor_of("cu_seqlens", cu_seqlens)
    return tensor, from_cu_seqlens(tensor).q_ids


def _counts(lengths: Integers | None, keep: Tensor | None) -> Tensor:
    """Returns the number of tokens of each sequence, (N,) int64, from `lengths` or from `keep`."""
    if (lengths is None) == (keep is None):
        raise TypeError(f"lengths, keep: expected one of them, got {'neither' if keep is None else 'both'}")
    if keep is not None:
        return _checked_keep(keep).sum(-1)
    counts = tensor_of("lengths", lengths)
    if counts.ndim != 1 or not holds_integers(counts):
        raise ValueError(f"lengths: expected integers of shape (N,), got {describe(counts)}")
    if len(counts) and int(counts.min()) < 0:
        raise ValueError(f"lengths: expected integers >= 0, got {int(counts.min())}")
    return counts.long()


def _checked_keep(keep: Tensor) -> Tensor:
    if not isinstance(keep, Tensor) or keep.dtype is not torch.bool or keep.ndim != 2:
        raise TypeError(f"keep: expected a bool tensor (N, L), True = real token, got {describe(keep)}")
    return keep


# Packing and unpacking


def pack(x: Tensor, lengths: Integers | None = None, *, keep: Tensor | None = None, dim: int = -2) -> Tensor:
    """Packs the real tokens of a padded batch into one row: (N, ..., L, D) -> (..., total, D).

    Differentiable. The gradient of padding is 0.

    Args:
        x: a padded batch of any dtype. Dim 0 is the batch dim.
        lengths: integers (N,): the first lengths[n] tokens of sequence n are real.
        keep: instead of lengths, bool (N, L): True = real token. Padding may be anywhere.
        dim: the dim of the tokens: -2 for (N, L, E) and (N, H, L, D), -3 for (N, L, H, D), -1 for
            (N, L).
    """
    dim = _token_dim(x, dim, 1)
    real = _real_tokens(lengths, keep, x.shape[0], x.shape[dim])
    return x.movedim(dim, 1)[real].movedim(0, dim - 1)


def unpack(
    x: Tensor, cu_seqlens: Integers | None = None, *, keep: Tensor | None = None, length: int | None = None,
    dim: int = -2,
) -> Tensor:  # fmt: skip
    """Unpacks a row into a padded batch: (..., total, D) -> (N, ..., L, D). Padding is zero.

    Differentiable.

    Args:
        x: a packed row of any dtype.
        cu_seqlens: integers (N + 1,). The padding of each sequence comes last.
        keep: instead of cu_seqlens, bool (N, L): True = real token, as for `pack`.
        length: L, allowed only with `cu_seqlens`. Default: the length of the longest sequence.
        dim: the dim of the tokens in x: -2 for (total, E) and (H, total, D), -3 for (total, H, D),
            -1 for (total,).
    """
    dim = _token_dim(x, dim, 0)
    counts = None if cu_seqlens is None else lengths(cu_seqlens)
    N, L = _padded_size(counts, keep, length)
    real = _real_tokens(counts, keep, N, L)
    total = len(real[0])
    if total != x.shape[dim]:
        name = "keep" if counts is None else "cu_seqlens"
        raise ValueError(
            f"{name}: expected {x.shape[dim]} tokens, as in dim {dim} of x {tuple(x.shape)}, got {total}"
        )
    tokens = x.movedim(dim, 0)
    return tokens.new_zeros(N, L, *tokens.shape[1:]).index_put_(real, tokens).movedim(1, dim + 1)


def _token_dim(x: Tensor, dim: int, least: int) -> int:
    """Returns `dim` as a non-negative index.

    `least` is the lowest index allowed: 1 for a padded batch, because its dim 0 is the batch dim.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {describe(x)}")
    if not least <= dim + x.ndim * (dim < 0) < x.ndim:
        raise ValueError(f"dim: expected one of {least}, ..., {x.ndim - 1} for x {tuple(x.shape)}, got {dim}")
    return dim % x.ndim


def _padded_size(counts: Tensor | None, keep: Tensor | None, length: int | None) -> tuple[int, int]:
    """Returns (N, L), the number of sequences and the length of the padded batch."""
    if keep is not None:
        if length is not None:
            raise TypeError(f"length: expected None with keep, got {length}")
        return _checked_keep(keep).shape[0], keep.shape[1]
    if counts is None:
        raise TypeError("cu_seqlens, keep: expected one of them, got neither")
    return len(counts), int(counts.max()) if length is None else count("length", length)


def _real_tokens(lengths: Integers | None, keep: Tensor | None, N: int, L: int) -> tuple[Tensor, ...]:
    """Returns two index tensors (total,): the sample and the column of each real token."""
    counts = _counts(lengths, keep)
    if keep is None:
        if len(counts) != N or (N and int(counts.max()) > L):
            raise ValueError(f"lengths: expected {N} integers up to L = {L}, got {counts.tolist()}")
        keep = torch.arange(L, device=counts.device) < counts[:, None]
    elif keep.shape != (N, L):
        raise ValueError(f"keep: expected shape (N, L) = {(N, L)}, got {tuple(keep.shape)}")
    return keep.nonzero(as_tuple=True)


# Attention


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None, *,
    causal: bool = False, window: Reach | tuple[Reach, Reach] = None, mask: Mask | None = None,
    offset: int | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
    softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | Tensor | None = None, return_lse: Literal[False] = False, impl: str = "auto",
) -> Tensor: ...  # fmt: skip


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None, *,
    causal: bool = False, window: Reach | tuple[Reach, Reach] = None, mask: Mask | None = None,
    offset: int | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
    softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | Tensor | None = None, return_lse: Literal[True], impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None, *,
    causal: bool = False, window: Reach | tuple[Reach, Reach] = None, mask: Mask | None = None,
    offset: int | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
    softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | Tensor | None = None, return_lse: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@hide_unknown
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None, *,
    causal: bool = False, window: Reach | tuple[Reach, Reach] = None, mask: Mask | None = None,
    offset: int | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
    softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | Tensor | None = None, return_lse: bool = False, impl: str = "auto", **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Computes attention within each sequence of a packed row.

    The result is that of `attention` on each sequence separately, concatenated. Options not listed
    here are as in `attention`.

    Args:
        q: queries (total_q, Hq, D).
        k: keys (total_k, Hkv, D).
        v: values (total_k, Hkv, Dv).
        cu_seqlens_q: integers (N + 1,), for the queries.
        cu_seqlens_k: integers (N + 1,), for the keys. Default: cu_seqlens_q.
        causal: whether to apply `masks.Causal()`. Without `offset` it is aligned to the bottom
            right of each sequence.
        window: an int is the number of keys that a query attends to, its own included and last
            (`masks.sliding`). A pair (left, right) gives the distances to the farthest earlier and
            later key, None in it means no limit (`masks.Window`). Default: no window.
        mask: a mask that applies to a sequence of any length: Causal, Window, Dilated, Prefix,
            Global, RandomBlocks, PerHead, and combinations with `&`, `|`, `~`.
        offset: the position of query 0 of each sequence: an int, or integers (N,). Default Lk - Lq
            of the sequence.
        bias: `scores.Alibi` or `scores.RelativeBias`, applied to positions within the sequence, or
            a tensor broadcastable to (Hq, total_q, total_k).

    Returns:
        out (total_q, Hq, Dv). With `return_lse`, also the LSE (Hq, total_q).

    Example:
        >>> cu = packing.cu_seqlens([300, 100, 200])
        >>> q = k = v = torch.randn(600, 8, 64)
        >>> packing.varlen_attention(q, k, v, cu, causal=True).shape
        torch.Size([600, 8, 64])
    """
    if unknown:
        raise unknown_keyword(varlen_attention, unknown)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise ValueError(f"{name}: expected a tensor (total, H, D), got {describe(x)}")
    options = {
        "mask": _combined_mask(causal, window, mask), "offset": offset, "bias": bias, "scale": scale,
        "softcap": softcap, "sink": sink, "dropout": dropout, "seed": seed, "return_lse": return_lse,
        "impl": impl,
    }  # fmt: skip
    cu_q = tensor_of("cu_seqlens_q", cu_seqlens_q)
    cu_k = cu_q if cu_seqlens_k is None else tensor_of("cu_seqlens_k", cu_seqlens_k)
    heads_first = (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    out, lse = attend_packed(attention, heads_first, cu_q, cu_k, options)
    return out.transpose(0, 1) if lse is None else (out.transpose(0, 1), lse)


def _combined_mask(causal: bool, window: Reach | tuple[Reach, Reach], mask: Mask | None) -> Mask | None:
    local = both(Causal() if causal else None, None if window is None else _local_mask(window))
    return both(local, mask)


def _local_mask(window: int | tuple[Reach, Reach]) -> Mask:
    if not isinstance(window, (tuple, list)):
        return Window(count("window", window, 1) - 1, 0)
    if len(window) != 2:
        raise ValueError(f"window: expected a number of keys or distances (left, right), got {window}")
    return Window(*window)
