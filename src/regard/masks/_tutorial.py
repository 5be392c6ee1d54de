"""Functions with the names that tutorials use. They return bool tensors; True = may attend."""

from __future__ import annotations

from torch import Tensor

from .._tools.arguments import describe, tensor_of
from ._atoms import Causal, Documents, Window
from ._patterns import prefix_lm


def create_causal_mask(Lq: int, Lk: int | None = None) -> Tensor:
    """Returns a causal mask (Lq, Lk), aligned to the bottom right. Lk defaults to Lq."""
    return Causal().to_dense(Lq, Lq if Lk is None else Lk)


def create_window_mask(Lq: int, left: int, right: int = 0, Lk: int | None = None) -> Tensor:
    """Returns a mask (Lq, Lk): keys from `left` before to `right` after each query are allowed."""
    return Window(left, right).to_dense(Lq, Lq if Lk is None else Lk)


def create_prefix_mask(L: int, n: int) -> Tensor:
    """Returns a causal mask (L, L) in which every query may also attend to the first n keys."""
    return prefix_lm(n).to_dense(L, L)


def create_document_mask(ids: Tensor) -> Tensor:
    """Returns a mask that allows keys whose document id equals the query's.

    The result is (L, L) for ids (L,), and (B, 1, L, L) for ids (B, L).
    """
    mask = Documents(ids)
    L = mask.q_ids.shape[-1]
    return mask.to_dense(L, L)


def create_padding_mask(tokens: Tensor, pad: int = 0) -> Tensor:
    """Returns a mask (B, 1, 1, L) that excludes keys where `tokens` (B, L) equals `pad`."""
    tokens = tensor_of("tokens", tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens: expected shape (B, L), got {describe(tokens)}")
    return (tokens != pad)[:, None, None, :]


def create_decoder_mask(tokens: Tensor, pad: int = 0) -> Tensor:
    """Returns a causal mask (B, 1, L, L) that excludes keys where `tokens` (B, L) equals `pad`."""
    real = create_padding_mask(tokens, pad)
    return real & create_causal_mask(real.shape[-1]).to(real.device)
