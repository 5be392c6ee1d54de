"""Bahdanau's additive attention: scores from a small neural network instead of dot products."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.types import Device

from .._api.attention import check_weights
from .._api.projection import Linear
from .._autograd import additive
from .._call.additive import check
from .._tools.arguments import count, describe, probability
from .._tools.words import check_keywords, hide_unknown, unknown_keyword
from ..masks import Lengths, Mask
from ..masks._both import both
from ._context import ContextInputs
from ._lengths import checked_lengths
from ._options import Context, LayerOptions, Memory, checked_mask, is_nested


class AdditiveAttention(ContextInputs):
    """Additive attention (Bahdanau et al., 2015): (B, L, d_model) -> (B, L, width of the values).

    The score of query q and key k is score . tanh(W_q q + W_k k + b). Values are not projected, and
    there is one head. Memory is linear in the number of tokens: (Lq, Lk, hidden) never exists
    whole, and backward computes the scores again.

    Args:
        d_model: width of the queries.
        hidden: width of the hidden layer, which W_q and W_k map to. Default: `d_model`.
        kv_model: width of the context. Default: `d_model`.
        value_model: width of the tokens `value`, if values are other tokens than keys.
        bias: if True, the hidden layer has a bias b.
        mask: a mask for every call. Example: `masks.Causal()`.
        dropout: dropout probability of the attention weights in training.

    Example:
        >>> attend = regard.nn.AdditiveAttention(512, hidden=256, kv_model=384)
        >>> state, source = torch.randn(2, 1, 512), torch.randn(2, 30, 384)
        >>> attend(state, source, lengths=torch.tensor([30, 12])).shape
        torch.Size([2, 1, 384])
    """

    _shown = ("d_model", "hidden", "kv_model", "value_model", "mask", "dropout")

    @check_keywords
    def __init__(
        self, d_model: int, *positional: int, hidden: int | None = None, kv_model: int | None = None,
        value_model: int | None = None, bias: bool = True, mask: Mask | None = None, dropout: float = 0.0,
        device: Device = None, dtype: torch.dtype | None = None, **unknown: NoReturn,
    ) -> None:  # fmt: skip
        _check_names(d_model, positional)
        super().__init__()
        self.d_model = count("d_model", d_model, 1)
        self.hidden = count("hidden", d_model if hidden is None else hidden, 1)
        self.kv_model = None if kv_model is None else count("kv_model", kv_model, 1)
        self.value_model = None if value_model is None else count("value_model", value_model, 1)
        self.kv_heads, self.head_dim, self.value_dim = 1, self.hidden, self._value_width
        self.mask, self.dropout = checked_mask(mask), probability("dropout", dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q = Linear(self.d_model, self.hidden, bias, **factory)
        self.k = Linear(self._context_width, self.hidden, False, **factory)
        self.score = nn.Parameter(torch.empty(self.hidden, **factory))
        nn.init.uniform_(self.score, -(self.hidden**-0.5), self.hidden**-0.5)  # as nn.Linear(hidden, 1)

    @hide_unknown
    def forward(
        self, x: Tensor, context: Context = None, value: Tensor | None = None, *,
        mask: Mask | Tensor | None = None, lengths: Tensor | None = None, return_weights: bool = False,
        **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Computes attention from x to `context`, or from x to itself: (B, L, width of the values).

        Args:
            x: (B, L, d_model) or (L, d_model).
            context: (B, Lk, kv_model), unbatched like x, or the result of `remember`. Default: x.
            value: the values, (B, Lk, value_model). Default: the tokens of `context`.
            mask: a mask or a bool tensor (True = may attend) that applies together with the
                module's mask. A tensor is (L, Lk), (B, L, Lk) or (B, 1, L, Lk).
            lengths: (B,), the number of real tokens of each context. The rest is padding.
            return_weights: if True, returns the pair (output, weights). The weights before dropout
                are (B, 1, L, Lk), or (1, L, Lk) if x is unbatched.
        """
        if unknown:
            raise unknown_keyword(AdditiveAttention.forward, unknown)
        options = LayerOptions(mask)
        self._check(x, context, value, options)
        source = x if context is None else context
        k, v = source if isinstance(source, Memory) else self._keys(source, value)
        allowed = both(self.mask, options.sample_mask())
        if lengths is not None:
            allowed = both(allowed, Lengths(_key_lengths(lengths, k)))
        q, dropout = _projected(self.q, x), self.dropout if self.training else 0.0
        out, weights = self._attend(q, k, v, allowed, dropout, return_weights)
        return out.squeeze(-3) if weights is None else (out.squeeze(-3), weights)

    def remember(self, context: Tensor, value: Tensor | None = None) -> Memory:
        """Returns the projected keys and the values of a context.

        Pass them as `context` in later calls, such as the steps of a decoder.
        """
        self._check_context(context, value)
        return Memory(*self._keys(context, value))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """Computes attention without projections and dropout.

        q (..., 1, L, hidden), k (..., 1, Lk, hidden), v (..., 1, Lk, Dv) -> (..., 1, L, Dv).
        """
        return self._attend(q, k, v, mask, 0.0, False)[0]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, dropout: float, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        call, spec = check((q, k, v), self.score, mask, dropout, weights)
        if weights:
            check_weights(spec)
        out, w = additive.run(call)
        return out.reshape(spec.out_shape), None if w is None else w.reshape(spec.weights_shape)

    def _keys(self, context: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns keys (..., 1, Lk, hidden) and values (..., 1, Lk, Dv), which are not projected."""
        v = context if value is None else value
        return _projected(self.k, context), v.unsqueeze(-3)

    def _check(self, x: Tensor, context: Context, value: Tensor | None, options: LayerOptions) -> None:
        if is_nested("x", x):
            raise TypeError(f"x: expected (..., L, d_model = {self.d_model}), got a nested tensor")
        options.check(x, context, self.d_model)
        self._check_inputs(context, value)


def _projected(projection: nn.Linear, tokens: Tensor) -> Tensor:
    """Projects tokens (..., L, E) to (..., 1, L, hidden).

    The projection of a token that is not finite is NaN. Its gradient is 0, and it adds nothing to
    the gradient of the projection. So NaN in padding reaches no gradient.
    """
    finite = tokens.isfinite().all(-1, keepdim=True)
    projected: Tensor = torch.where(finite, projection(torch.where(finite, tokens, 0.0)), torch.nan)
    return projected.unsqueeze(-3)


def _key_lengths(lengths: Tensor, k: Tensor) -> Tensor:
    """Returns the checked lengths (B,) of the contexts whose keys are k (B, 1, Lk, hidden)."""
    if k.dim() != 4:
        raise ValueError(f"lengths: expected None without a batch dim, got {describe(lengths)}")
    checked = checked_lengths(lengths, k)
    assert checked is not None
    return checked


def _check_names(d_model: int, positional: tuple[int, ...]) -> None:
    """Raises TypeError for a second number by position, which may be one of several widths."""
    if positional:
        n, got = positional[0], ", ".join(map(repr, positional))
        raise TypeError(
            f"AdditiveAttention: expected sizes after d_model by name, got {got}; "
            f"write AdditiveAttention({d_model}, hidden={n}) for a hidden layer of width {n}, or "
            f"AdditiveAttention({d_model}, kv_model={n}) for a context of width {n}"
        )
