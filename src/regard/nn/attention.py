"""Projections around `regard.attention`: one module for self- and cross-attention, any grouping of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from .._call.spec import QKV
from .._tools.arguments import count, describe, probability
from .._tools.watching import is_watched
from ..cache import KVCache, LatentCache, LinearCache
from ..masks import Mask
from ..positions import AlibiBias, Positions, Relative, Rotary, rotate
from ._layer import AttentionLayer
from ._nested import packed_tokens
from ._options import CacheLike, Context, LayerOptions, Memory, is_nested, own_mask
from ._sizes import GroupedHeads, join_heads, split_heads

Rule = Rotary | AlibiBias | Relative


class Attention(AttentionLayer, GroupedHeads):
    """Multi-head attention with its projections: self, cross or masked, with any grouping of heads.

    Args:
        d_model: the width of the tokens that ask, and of the result.
        heads: query heads Hq.
        kv_heads: key heads Hkv, a divisor of `heads`. Default: as many (multi-head); 1 is multi-query.
        head_dim: D of queries and keys. Default d_model / heads.
        value_dim: Dv. Default `head_dim`.
        kv_model: the width of the context, for cross-attention, whose projections are `q` and `kv`. Default:
            the tokens are their own context, and one matrix `qkv` makes queries, keys and values.
        bias: whether the projections of queries, keys and values have biases.
        out_bias: whether the last one has. Default: as `bias`.
        qk_norm: a norm of queries and keys, made by `qk_norm(head_dim)`, such as `nn.RMSNorm`.
        position: `positions.Rotary`, `positions.AlibiBias` or `positions.Relative`. Layers may share one.
        mask: a mask of every call, such as `masks.Causal()`.
        scale, softcap: as in `regard.attention`.
        sink: learn a logit for each head that takes probability and gives nothing.
        dropout: of the weights, in training.
        gate: multiply the heads' results by the sigmoid of a projection of x, before the last projection.

    Example:
        >>> attend = regard.nn.Attention(512, 8, kv_heads=2, position=Rotary(64), mask=masks.Causal())
        >>> attend(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])
    """

    _shown = (
        "heads", "kv_heads", "head_dim", "value_dim", "dropout", "kv_model", "mask", "scale", "softcap",
    )  # fmt: skip

    def __init__(
        self, d_model: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, kv_model: int | None = None, bias: bool = True,
        out_bias: bool | None = None, qk_norm: Callable[[int], nn.Module] | None = None,
        position: Rule | None = None, mask: Mask | None = None, scale: float | None = None,
        softcap: float | None = None, sink: bool = False, dropout: float = 0.0, gate: bool = False,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, heads, kv_heads, head_dim, value_dim)
        self.kv_model = None if kv_model is None else count("kv_model", kv_model, 1)
        self.scale, self.softcap, self.mask = scale, softcap, own_mask(mask)
        self.dropout = probability("dropout", dropout)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_projections(bias, bias if out_bias is None else out_bias, gate, made)
        self.q_norm = None if qk_norm is None else qk_norm(self.head_dim).to(**made)
        self.k_norm = None if qk_norm is None else qk_norm(self.head_dim).to(**made)
        self.position = _checked_rule(position, self)
        self.sink = nn.Parameter(torch.zeros(heads, **made)) if sink else None

    def _make_projections(self, bias: bool, out_bias: bool, gate: bool, made: dict[str, Any]) -> None:
        queries, keys, values = self._widths
        out = self.heads * self.value_dim
        if self.kv_model is None:
            self.qkv = nn.Linear(self.d_model, queries + keys + values, bias, **made)
        else:
            self.q = nn.Linear(self.d_model, queries, bias, **made)
            self.kv = nn.Linear(self.kv_model, keys + values, bias, **made)
        self.gate = nn.Linear(self.d_model, out, False, **made) if gate else None
        self.out = nn.Linear(out, self.d_model, out_bias, **made)

    def forward(
        self, x: Tensor, context: Context = None, *, mask: Mask | Tensor | None = None,
        lengths: Tensor | None = None, positions: Positions | None = None, cu_seqlens: Tensor | None = None,
        context_cu_seqlens: Tensor | None = None, cache: CacheLike | None = None,
    ) -> Tensor:  # fmt: skip
        """Attends from x to the context, or to itself.

        Args:
            x: (B, L, d_model), (L, d_model), packed (total, d_model) with `cu_seqlens`, or nested
                (N, j, d_model).
            context: (B, Lk, kv_model) and so on, or what `remember` made of it. Default: x.
            mask: narrows the module's own mask, as in `regard.attention`; True = may attend.
            lengths: (B,): the first n tokens of each sample are real, the rest is padding.
            positions: the places of x for `Rotary`: an int, (L,) or (B, L). Default: from 0 on, after those
                of the cache, or anew in each packed sequence.
            cu_seqlens: (N + 1,): the borders of packed sequences; then x holds their tokens end to end.
            context_cu_seqlens: those of a packed context.
            cache: a cache of `regard.cache`: appends the keys of x and attends causally to all it holds.
        """
        options = LayerOptions(mask, lengths, positions, cu_seqlens, context_cu_seqlens, cache)
        if is_nested("x", x):
            return self._forward_nested(x, options, **self._nested_context(context))
        self._check(x, context, options)
        q, k, v = self._projected(x, context)
        q, k = self._placed(q, k, options.places(x.shape[-2]) if isinstance(self.position, Rotary) else 0)
        allowed, dropout = self._mask_and_dropout(options)
        if cache is None:
            found = self._attend((q, k, v), options, allowed, dropout)
        else:
            padded = {} if lengths is None else {"lengths": lengths}
            found = cache.attend(q, k, v, mask=allowed, **padded, **self._options())
        joined = join_heads(found)
        out: Tensor = self.out(joined if self.gate is None else joined * self.gate(x).sigmoid())
        return out

    def remember(self, context: Tensor) -> Memory:
        """Returns the keys and values of a context, for calls with the same one."""
        self._check_context(context)
        return Memory(*self._keys(context))

    def arguments(self, x: Tensor, positions: Positions = 0) -> tuple[QKV, dict[str, Any]]:
        """Returns the arguments of `regard.attention` for x: (q, k, v) and options, without dropout.

        So `regard.weights(*qkv, **options)` are the weights of this layer.
        """
        self._check(x, None, LayerOptions())
        q, k, v = self._projected(x, None)
        return (*self._placed(q, k, positions), v), {"mask": self.mask, **self._options()}

    def new_cache(self, B: int, capacity: int | None = None) -> KVCache:
        """Returns an empty cache for B samples, of the dtype and on the device of the weights."""
        if self.kv_model not in (None, self.d_model):
            raise ValueError(
                f"new_cache: expected self-attention, got kv_model = {self.kv_model}; for a context, "
                "`remember` keeps keys and values"
            )
        made, sizes = self.out.weight, (self.kv_heads, self.head_dim, self.value_dim)
        return KVCache(B, *sizes, capacity=capacity, dtype=made.dtype, device=made.device)

    def _projected(self, x: Tensor, context: Context) -> QKV:
        """Returns q (..., Hq, L, D), k (..., Hkv, Lk, D), v (..., Hkv, Lk, Dv)."""
        if context is None and self.kv_model is None:
            q, k, v = self.qkv(x).split(self._widths, -1)
            return split_heads(q, self.heads), *self._normed_keys(k, v)
        q = split_heads(F.linear(x, *self._part(0)) if self.kv_model is None else self.q(x), self.heads)
        return q, *(context if isinstance(context, Memory) else self._keys(x if context is None else context))

    def _keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        kv = F.linear(context, *self._part(1)) if self.kv_model is None else self.kv(context)
        return self._normed_keys(*kv.split(self._widths[1:], -1))

    def _normed_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        return k if self.k_norm is None else self.k_norm(k), v

    def _part(self, which: int) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of `qkv` that make queries (0), or keys and values (1): matrix and bias."""
        queries, keys, values = self._widths
        sizes, bias = (queries, keys + values), self.qkv.bias
        return self.qkv.weight.split(sizes)[which], None if bias is None else bias.split(sizes)[which]

    def _placed(self, q: Tensor, k: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
        """Norms the queries and rotates queries and keys."""
        q = q if self.q_norm is None else self.q_norm(q)
        if not isinstance(self.position, Rotary):
            return q, k
        cos, sin = self.position.table(q, at)
        layout, own = self.position.layout, self._owns(q, k)
        turned_q = rotate(q, cos, sin, layout=layout, inplace=own)
        return turned_q, rotate(k, cos, sin, layout=layout, inplace=own)

    def _owns(self, q: Tensor, k: Tensor) -> bool:
        """Returns whether the projections' outputs may be overwritten: no gradient, no hook, no compiler."""
        projections = (self.qkv,) if self.kv_model is None else (self.q, self.kv)
        hooked = any(p._forward_hooks for p in projections)
        return not (q.requires_grad or k.requires_grad or hooked or is_watched(q, k, q))

    def _options(self) -> dict[str, Any]:
        bias = self.position() if isinstance(self.position, (AlibiBias, Relative)) else None
        return {"scale": self.scale, "softcap": self.softcap, "sink": self.sink, "bias": bias}

    def _nested_context(self, context: Context) -> dict[str, Tensor]:
        if context is None:
            return {}
        if isinstance(context, Memory):
            raise TypeError("context: expected a nested tensor as x is, got a Memory")
        packed = packed_tokens("context", context, self._context_width)
        return {"context": packed.tokens, "context_cu_seqlens": packed.cu_seqlens}

    @property
    def _context_width(self) -> int:
        return self.d_model if self.kv_model is None else self.kv_model

    def _check(self, x: Tensor, context: Context, options: LayerOptions) -> None:
        options.check(x, context, self.d_model)
        cache = options.cache
        is_other = isinstance(cache, LatentCache | LinearCache)
        if is_other or not (cache is None or callable(getattr(cache, "attend", None))):
            raise TypeError(f"cache: expected one of keys and values, as of new_cache, got {cache!r}")
        if not isinstance(self.position, Rotary):
            options.refuse("without position=Rotary(...)", "positions")
        if context is None:
            if self.kv_model not in (None, self.d_model):
                raise ValueError(f"context: expected tokens of width kv_model = {self.kv_model}, got None")
            return
        if self.position is not None:
            raise ValueError("context: expected None with a position rule, which is for self-attention")
        if isinstance(context, Memory):
            self._check_memory(context)
        else:
            self._check_context(context)

    def _check_context(self, context: Tensor) -> None:
        width = self._context_width
        if is_nested("context", context) or context.dim() not in (2, 3) or context.shape[-1] != width:
            raise ValueError(f"context: expected (..., Lk, {width}), got {describe(context)}")

    def _check_memory(self, memory: Memory) -> None:
        sizes = (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        for x, size, shape in zip(memory, sizes, ("(..., Hkv, Lk, D)", "(..., Hkv, Lk, Dv)"), strict=True):
            if x.shape[-3::2] != size:
                raise ValueError(f"context: expected a Memory of {shape} with {size}, got {describe(x)}")


# Arguments


def _checked_rule(position: Rule | None, module: Attention) -> Rule | None:
    if position is not None and not isinstance(position, Rotary | AlibiBias | Relative):
        raise TypeError(f"position: expected Rotary, AlibiBias or Relative, got {position!r}")
    if isinstance(position, Rotary) and position.dims > module.head_dim:
        raise ValueError(f"position: expected dims up to head_dim = {module.head_dim}, got {position.dims}")
    if isinstance(position, (AlibiBias, Relative)) and position().heads != module.heads:
        raise ValueError(f"position: expected heads = {module.heads}, got {position().heads}")
    return position


# The same under the names of textbooks


def SelfAttention(d_model: int, heads: int, **options: Any) -> Attention:
    """Tokens attend to each other; every head has keys of its own."""
    return Attention(d_model, heads, **options)


def CrossAttention(d_model: int, heads: int, kv_model: int | None = None, **options: Any) -> Attention:
    """Tokens attend to a context of width `kv_model` (default: their own): `attend(x, context)`."""
    return Attention(d_model, heads, kv_model=d_model if kv_model is None else kv_model, **options)


def MultiQueryAttention(d_model: int, heads: int, **options: Any) -> Attention:
    """All heads share one key head."""
    return Attention(d_model, heads, kv_heads=1, **options)


def GroupedQueryAttention(d_model: int, heads: int, kv_heads: int, **options: Any) -> Attention:
    """Groups of heads / kv_heads query heads share a key head."""
    return Attention(d_model, heads, kv_heads=kv_heads, **options)
