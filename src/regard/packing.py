"""Packed sequences: several of them end to end in one row, without padding, none seeing another.

A row of `total` tokens holds N sequences. `cu_seqlens` (N + 1,) are its borders: 0, n1, n1 + n2, ..., total.
Positions begin anew in every sequence, and a sequence may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from ._api.attention import attention
from ._api.packed import attend_packed
from ._call.spec import Bias
from ._tools.arguments import count, describe, holds_integers, tensor_of
from .masks import Causal, Mask, Window, from_cu_seqlens
from .masks._both import both

__all__ = ["cu_seqlens", "lengths", "pack", "positions", "unpack", "varlen_attention"]

Integers = Tensor | Sequence[int]
Reach = int | None


# Borders


def cu_seqlens(lengths: Integers | None = None, *, keep: Tensor | None = None) -> Tensor:
    """The borders (N + 1,), int32, of sequences that have these lengths (N,), packed.

    Instead of lengths: `keep`, bool (N, L), True = a real token, False = padding, wherever it stands.

    Example:
        >>> packing.cu_seqlens([3, 0, 2])
        tensor([0, 3, 3, 5], dtype=torch.int32)
    """
    counts = _counts(lengths, keep)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def lengths(cu_seqlens: Integers) -> Tensor:
    """The lengths (N,) of the sequences between these borders (N + 1,)."""
    return _checked_cu_seqlens(cu_seqlens)[0].diff()


def positions(cu_seqlens: Integers) -> Tensor:
    """(total,) int64: the place of each token in its own sequence, 0, 1, ..., for rotary embeddings."""
    borders, ids = _checked_cu_seqlens(cu_seqlens)
    return torch.arange(len(ids), device=ids.device) - borders[ids]


def _checked_cu_seqlens(cu_seqlens: Integers) -> tuple[Tensor, Tensor]:
    """The borders, and the number of its sequence for each token, (total,)."""
    borders = tensor_of("cu_seqlens", cu_seqlens)
    return borders, from_cu_seqlens(borders).q_ids


def _counts(lengths: Integers | None, keep: Tensor | None) -> Tensor:
    """The lengths (N,) int64, given or counted."""
    if (lengths is None) == (keep is None):
        raise TypeError(f"expected either lengths or keep, got {'neither' if keep is None else 'both'}")
    if keep is not None:
        return _checked_keep(keep).sum(-1)
    counts = tensor_of("lengths", lengths)
    if counts.ndim != 1 or not holds_integers(counts):
        raise ValueError(f"lengths: expected integers of shape (N,), got {describe(counts)}")
    if len(counts) and int(counts.min()) < 0:
        raise ValueError(f"lengths: expected numbers from 0 on, got {int(counts.min())}")
    return counts.long()


def _checked_keep(keep: Tensor) -> Tensor:
    if not isinstance(keep, Tensor) or keep.dtype is not torch.bool or keep.ndim != 2:
        raise TypeError(f"keep: expected a bool tensor (N, L), True = a real token, got {describe(keep)}")
    return keep


# Padded and packed


def pack(x: Tensor, lengths: Integers | None = None, *, keep: Tensor | None = None, dim: int = -2) -> Tensor:
    """The real tokens of a padded batch in one row: (N, ..., L, D) -> (..., total, D).

    Args:
        x: the batch, any dtype. Dim 0 counts the sequences, `dim` the tokens: -2 for (N, L, E) and
            (N, H, L, D), -3 for (N, L, H, D), -1 for (N, L).
        lengths: (N,): the first n tokens of each sequence are real.
        keep: instead of lengths, bool (N, L): True = a real token, so that padding may stand anywhere.
        dim: where the tokens are.

    Gradients flow; padding gets 0.
    """
    dim = _token_dim(x, dim, 1)
    real = _real(lengths, keep, x.shape[0], x.shape[dim])
    return x.movedim(dim, 1)[real].movedim(0, dim - 1)


def unpack(
    x: Tensor, cu_seqlens: Integers | None = None, *, keep: Tensor | None = None, length: int | None = None,
    dim: int = -2,
) -> Tensor:  # fmt: skip
    """A padded batch from a packed row: (..., total, D) -> (N, ..., L, D), zeros where there is no token.

    Args:
        x: the row, any dtype.
        cu_seqlens: (N + 1,): the borders; each sequence comes first in its line.
        keep: instead of borders, bool (N, L), True = a real token: the tokens go back to these places.
        length: L with `cu_seqlens`. Default: the longest sequence.
        dim: where the tokens are. Counted from the end it is the same number as for `pack`.

    Gradients flow.
    """
    dim = _token_dim(x, dim, 0)
    counts = None if cu_seqlens is None else lengths(cu_seqlens)
    N, L = _padded_size(counts, keep, length)
    real = _real(counts, keep, N, L)
    total = len(real[0])
    if total != x.shape[dim]:
        name = "keep" if counts is None else "cu_seqlens"
        raise ValueError(
            f"{name}: expected {x.shape[dim]} tokens as in dim {dim} of x {tuple(x.shape)}, got {total}"
        )
    tokens = x.movedim(dim, 0)
    return tokens.new_zeros(N, L, *tokens.shape[1:]).index_put_(real, tokens).movedim(1, dim + 1)


def _token_dim(x: Tensor, dim: int, least: int) -> int:
    """`dim` counted from the front; in a padded batch dim 0 counts the sequences."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {describe(x)}")
    if not least <= dim + x.ndim * (dim < 0) < x.ndim:
        raise ValueError(f"dim: expected one of {least}, ..., {x.ndim - 1} for x {tuple(x.shape)}, got {dim}")
    return dim % x.ndim


def _padded_size(counts: Tensor | None, keep: Tensor | None, length: int | None) -> tuple[int, int]:
    """N and L."""
    if keep is not None:
        if length is not None:
            raise TypeError(f"length: expected with cu_seqlens only, keep has its own, got {length}")
        return _checked_keep(keep).shape[0], keep.shape[1]
    if counts is None:
        raise TypeError("expected either cu_seqlens or keep, got neither")
    return len(counts), int(counts.max()) if length is None else count("length", length)


def _real(lengths: Integers | None, keep: Tensor | None, N: int, L: int) -> tuple[Tensor, ...]:
    """Where the real tokens stand in a padded batch: (total,) sequences, (total,) places in them."""
    counts = _counts(lengths, keep)
    if keep is None:
        if len(counts) != N or (N and int(counts.max()) > L):
            raise ValueError(f"lengths: expected {N} numbers up to L = {L}, got {counts.tolist()}")
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


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None, *,
    causal: bool = False, window: Reach | tuple[Reach, Reach] = None, mask: Mask | None = None,
    offset: int | Tensor | None = None, bias: Bias | None = None, scale: float | None = None,
    softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | Tensor | None = None, return_lse: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention inside each sequence of a packed row.

    The result is that of `attention` for every sequence alone, end to end. Options not named here mean what
    they mean there.

    Args:
        q: queries (total_q, Hq, D).
        k: keys (total_k, Hkv, D).
        v: values (total_k, Hkv, Dv).
        cu_seqlens_q: the borders (N + 1,) of the queries' sequences: 0, n1, n1 + n2, ..., total_q.
        cu_seqlens_k: those of the keys'. Default: the same as the queries'.
        causal: `& masks.Causal()`: by default the last query of a sequence meets its last key.
        window: `& masks.Window(left)`, or for a pair `& masks.Window(left, right)`; None is unlimited.
        mask: a mask that is applied to every sequence: Causal, Window, Dilated, Prefix, Global, RandomBlocks,
            PerHead and what `&`, `|`, `~` make of them.
        offset: the position of each sequence's first query among its keys: an int for all, or integers (N,).
            Default: the number of its keys less that of its queries.
        bias: `scores.Alibi` or `scores.RelativeBias` with the positions of each sequence, or a tensor
            broadcastable to (Hq, total_q, total_k).

    Returns:
        out (total_q, Hq, Dv); with `return_lse` also the LSE (Hq, total_q).

    Example:
        >>> cu = packing.cu_seqlens([300, 100, 200])
        >>> q = k = v = torch.randn(600, 8, 64)
        >>> packing.varlen_attention(q, k, v, cu, causal=True).shape
        torch.Size([600, 8, 64])
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise ValueError(f"{name}: expected a tensor (total, H, D), got {describe(x)}")
    options = {
        "mask": _joined(causal, window, mask), "offset": offset, "bias": bias, "scale": scale,
        "softcap": softcap, "sink": sink, "dropout": dropout, "seed": seed, "return_lse": return_lse,
        "impl": impl,
    }  # fmt: skip
    borders_q = tensor_of("cu_seqlens_q", cu_seqlens_q)
    borders_k = borders_q if cu_seqlens_k is None else tensor_of("cu_seqlens_k", cu_seqlens_k)
    rows = (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    out, lse = attend_packed(attention, rows, borders_q, borders_k, options)
    return out.transpose(0, 1) if lse is None else (out.transpose(0, 1), lse)


def _joined(causal: bool, window: Reach | tuple[Reach, Reach], mask: Mask | None) -> Mask | None:
    reach = window if isinstance(window, tuple) else (window,)
    near = both(Causal() if causal else None, None if window is None else Window(*reach))
    return both(near, mask)
