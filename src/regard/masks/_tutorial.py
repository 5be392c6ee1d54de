"""Functions with the names that tutorials use. They return bool tensors; True means "may attend"."""

from __future__ import annotations

from torch import Tensor

from .._tools.arguments import describe, tensor_of
from ._atoms import Causal, Documents, Window
from ._patterns import prefix_lm


def create_causal_mask(Lq: int, Lk: int | None = None) -> Tensor:
    """(Lq, Lk): each query sees the keys up to its own; the last query meets the last key."""
    return Causal().to_dense(Lq, Lq if Lk is None else Lk)


def create_window_mask(Lq: int, left: int, right: int = 0, Lk: int | None = None) -> Tensor:
    """(Lq, Lk): each query sees `left` keys before and `right` after its own."""
    return Window(left, right).to_dense(Lq, Lq if Lk is None else Lk)


def create_prefix_mask(L: int, n: int) -> Tensor:
    """(L, L): causal, and everybody sees the first n keys."""
    return prefix_lm(n).to_dense(L, L)


def create_document_mask(ids: Tensor) -> Tensor:
    """(L,) -> (L, L), (B, L) -> (B, 1, L, L): tokens see the tokens with the same id."""
    same = Documents(ids)
    L = same.q_ids.shape[-1]
    return same.to_dense(L, L)


def create_padding_mask(tokens: Tensor, pad: int = 0) -> Tensor:
    """(B, L) token numbers -> (B, 1, 1, L): everybody sees the tokens that are not `pad`."""
    tokens = tensor_of("tokens", tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have shape (B, L), got {describe(tokens)}")
    return (tokens != pad)[:, None, None, :]


def create_decoder_mask(tokens: Tensor, pad: int = 0) -> Tensor:
    """(B, L) token numbers -> (B, 1, L, L): causal and not `pad`."""
    real = create_padding_mask(tokens, pad)
    return real & create_causal_mask(real.shape[-1]).to(real.device)
