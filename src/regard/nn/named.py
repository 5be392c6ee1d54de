"""Attention modules under the names and arguments of papers and textbooks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._api.attention import attention, weights
from .._tools.arguments import probability
from .._tools.words import check_options
from ..masks import Causal, Mask
from ._module import CheckedModule
from .attention import Attention

named = check_options(Attention.__init__)


@named
def SelfAttention(
    d_model: int, *positional: int, heads: int = 1, d_k: int | None = None, d_v: int | None = None,
    **options: Any,
) -> Attention:  # fmt: skip
    """Returns an `Attention` for self-attention: `attend(x)`.

    Args:
        d_model: width of the tokens.
        heads: number of heads.
        d_k: width of a query and key head, `head_dim` of `Attention`. Default: d_model / heads.
        d_v: width of a value head, `value_dim` of `Attention`. Default: `d_k`.
        options: further arguments of `Attention`, such as `out=False`.

    Example:
        >>> regard.nn.SelfAttention(16, d_k=8, d_v=6, out=False)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 6])
    """
    _check_names("SelfAttention", d_model, positional)
    return Attention(d_model, heads, head_dim=d_k, value_dim=d_v, **options)


@named
def CausalSelfAttention(
    d_model: int, *positional: int, heads: int = 1, d_k: int | None = None, d_v: int | None = None,
    **options: Any,
) -> Attention:  # fmt: skip
    """Returns a `SelfAttention` with the mask `Causal()`, as in GPT. The arguments are the same."""
    _check_names("CausalSelfAttention", d_model, positional)
    return Attention(d_model, heads, head_dim=d_k, value_dim=d_v, **{"mask": Causal()} | options)


@named
def CrossAttention(
    d_model: int, *positional: int, heads: int = 1, d_k: int | None = None, d_v: int | None = None,
    kv_model: int | None = None, **options: Any,
) -> Attention:  # fmt: skip
    """Returns an `Attention` for cross-attention to a context (B, Lk, kv_model).

    Call it as `attend(x, context)`. `kv_model` defaults to `d_model`. The other arguments are those
    of `SelfAttention`.
    """
    _check_names("CrossAttention", d_model, positional)
    kv_model = d_model if kv_model is None else kv_model
    return Attention(d_model, heads, head_dim=d_k, value_dim=d_v, kv_model=kv_model, **options)


@named
def MultiQueryAttention(d_model: int, heads: int, **options: Any) -> Attention:
    """Returns an `Attention` with one key head for all query heads.

    `options` are further arguments of `Attention`.
    """
    return Attention(d_model, heads, kv_heads=1, **options)


@named
def GroupedQueryAttention(d_model: int, heads: int, kv_heads: int, **options: Any) -> Attention:
    """Returns an `Attention` in which `heads / kv_heads` query heads share each key head.

    `options` are further arguments of `Attention`.
    """
    return Attention(d_model, heads, kv_heads=kv_heads, **options)


def _check_names(name: str, d_model: int, positional: tuple[int, ...]) -> None:
    """Raises TypeError for a second number by position, which may be the number of heads or d_k."""
    if positional:
        n = positional[0]
        raise TypeError(
            f"{name}: expected sizes after d_model by name, got {', '.join(map(repr, positional))}; write "
            f"{name}({d_model}, heads={n}) for {n} heads, or {name}({d_model}, d_k={n}) for queries and "
            f"keys of width {n}"
        )


class ScaledDotProductAttention(CheckedModule):
    """Attention without projections that returns (output, weights), as in textbooks.

    `regard.attention` computes the output alone, at O(n) memory.

    Args:
        scale: multiplies q.k. Default: 1 / sqrt(d_k). A temperature t is scale=1 / t.
        dropout: dropout probability of the attention weights in training.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 10, 64)
        >>> output, weights = regard.nn.ScaledDotProductAttention(dropout=0.1)(q, k, v)
    """

    _shown = ("scale", "dropout")

    def __init__(self, *positional: float, scale: float | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if positional:
            n = positional[0]
            raise TypeError(
                f"ScaledDotProductAttention: expected arguments by name, got {n!r}; write dropout={n!r} for "
                f"a dropout probability, or scale=1 / {n!r} for a temperature"
            )
        self.scale, self.dropout = scale, probability("dropout", dropout)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the output (B, H, Lq, d_v) and the weights before dropout (B, H, Lq, Lk).

        q is (B, H, Lq, d_k), k is (B, Hkv, Lk, d_k), v is (B, Hkv, Lk, d_v). The mask is a `Mask` or
        a bool tensor (True = may attend), (Lq, Lk) or broadcastable to (B, H, Lq, Lk).
        """
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask=mask, scale=self.scale, dropout=dropout)
        return out, weights(q, k, v, mask=mask, scale=self.scale)


# Names that `regard.nn` does not have, because textbooks give them several meanings or because another
# name exists, and what to write instead.
INSTEAD = {
    "MultiHeadAttention": (
        "Attention(d_model, heads), called as attend(x) or attend(q, k, v); "
        "PostNorm(d_model, Attention(d_model, heads)) with residual and LayerNorm; or "
        "MultiheadAttention(embed_dim, num_heads), PyTorch's module"
    ),
    "MultiHeadSelfAttention": "SelfAttention(d_model, heads=...)",
    "MaskedSelfAttention": "CausalSelfAttention(d_model, heads=...)",
    "MaskedMultiHeadAttention": "CausalSelfAttention(d_model, heads=...)",
    "MultiHeadCrossAttention": "CrossAttention(d_model, heads=...)",
    "CrossAttentionLayer": "CrossAttention(d_model, heads=...)",
    "MultiHeadLatentAttention": "LatentAttention(d_model, heads, rank=..., nope_dim=..., rope_dim=...)",
    "TransformerBlock": "EncoderBlock(d_model, heads), or DecoderBlock(d_model, heads) with a causal mask",
}


def missing(name: str) -> AttributeError:
    """Returns the error for a name that `regard.nn` does not have, with what to write instead."""
    advice = f"; write {INSTEAD[name]}" if name in INSTEAD else ""
    return AttributeError(f"module 'regard.nn' has no attribute {name!r}{advice}", name=name)
