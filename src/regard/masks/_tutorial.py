"""Functions with the names that tutorials use. They return masks, not bool tensors."""

from __future__ import annotations

from torch import Tensor

from .._tools.arguments import count, describe, tensor_of
from ._atoms import REQUIRED, Causal, Documents, Window
from ._convert import padding
from ._mask import Mask
from ._patterns import prefix_lm


def create_causal_mask(Lq: int, Lk: int | None = None) -> Mask:
    """Returns `Causal()`, which fits any Lq and Lk and is aligned to the bottom right."""
    _check_lengths(Lq, Lk)
    return Causal()


def create_window_mask(
    Lq: int, left: int | None, right: int | None = REQUIRED, Lk: int | None = None
) -> Mask:
    """Returns `Window(left, right)`: keys from `left` before to `right` after each query.

    `left` and `right` are distances. `sliding(n)` counts keys.
    """
    _check_lengths(Lq, Lk)
    return Window(left, right)


def create_prefix_mask(L: int, n: int) -> Mask:
    """Returns `prefix_lm(n)`: causal, and every query may also attend to the first n keys."""
    count("L", L)
    return prefix_lm(n)


def create_document_mask(ids: Tensor) -> Mask:
    """Returns `Documents(ids)`, which allows keys whose document id equals the query's.

    ids are (L,), or (B, L) if samples differ.
    """
    return Documents(ids)


def create_padding_mask(tokens: Tensor, pad: int = 0) -> Mask:
    """Returns a mask that excludes keys where `tokens` (B, L) equals `pad`."""
    tokens = tensor_of("tokens", tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens: expected shape (B, L), got {describe(tokens)}")
    return padding(tokens != pad)


def create_decoder_mask(tokens: Tensor, pad: int = 0) -> Mask:
    """Returns a causal mask that excludes keys where `tokens` (B, L) equals `pad`."""
    return create_padding_mask(tokens, pad) & Causal()


def _check_lengths(Lq: int, Lk: int | None) -> None:
    count("Lq", Lq)
    if Lk is not None:
        count("Lk", Lk)
