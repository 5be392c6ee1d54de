"""`Attention`: `regard.attention` with projections, and functions that build its common forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from .._call.spec import QKV
from .._tools.arguments import count, describe, probability
from .._tools.watching import is_watched
from .._tools.words import hide_unknown, unknown_keyword
from ..cache import KVCache, LatentCache, LinearCache
from ..masks import Mask
from ..positions import AlibiBias, Positions, Relative, Rotary, rotate
from ._layer import AttentionLayer
from ._nested import packed_tokens
from ._options import CacheLike, Context, LayerOptions, Memory, checked_mask, is_nested
from ._sizes import GroupedHeads, join_heads, split_heads

Rule = Rotary | AlibiBias | Relative


class Attention(AttentionLayer, GroupedHeads):
    """Multi-head attention with input and output projections: (B, L, d_model) -> (B, L, d_model).

    One module covers self-attention, cross-attention, grouped-query and multi-query attention.

    Args:
        d_model: width of the input and of the output.
        heads: number of query heads Hq.
        kv_heads: number of key heads Hkv, a divisor of `heads`. Default: `heads` (multi-head). 1 is
            multi-query attention.
        head_dim: D, the width of a query and key head. Default: d_model / heads.
        value_dim: Dv, the width of a value head. Default: `head_dim`.
        kv_model: width of the context in cross-attention. With it, the module has two projections,
            `q` and `kv`. Default: self-attention with one projection `qkv`.
        bias: if True, the projections of queries, keys and values have biases.
        out_bias: if True, the output projection has a bias. Default: `bias`.
        qk_norm: factory of the norms of queries and keys, called as `qk_norm(head_dim)`. Example:
            `nn.RMSNorm`.
        position: a `positions.Rotary`, `positions.AlibiBias` or `positions.Relative`. Layers may
            share one object.
        mask: a mask for every call. Example: `masks.Causal()`.
        scale, softcap: as in `regard.attention`.
        sink: if True, the layer learns one sink logit per head: an extra entry of the softmax that
            has no value.
        dropout: dropout probability of the attention weights in training.
        gate: if True, the attention output is multiplied by the sigmoid of a projection of x before
            the output projection.

    Example:
        >>> rotary, causal = regard.positions.Rotary(64), regard.masks.Causal()
        >>> attend = regard.nn.Attention(512, 8, kv_heads=2, position=rotary, mask=causal)
        >>> attend(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])
    """

    _shown = (
        "heads", "kv_heads", "head_dim", "value_dim", "dropout", "kv_model", "mask", "scale", "softcap",
    )  # fmt: skip

    @hide_unknown
    def __init__(
        self, d_model: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, kv_model: int | None = None, bias: bool = True,
        out_bias: bool | None = None, qk_norm: Callable[[int], nn.Module] | None = None,
        position: Rule | None = None, mask: Mask | None = None, scale: float | None = None,
        softcap: float | None = None, sink: bool = False, dropout: float = 0.0, gate: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, **unknown: Never,
    ) -> None:  # fmt: skip
        if unknown:
            raise unknown_keyword(Attention.__init__, unknown)
        super().__init__(d_model, heads, kv_heads, head_dim, value_dim)
        self.kv_model = None if kv_model is None else count("kv_model", kv_model, 1)
        self.scale, self.softcap, self.mask = scale, softcap, checked_mask(mask)
        self.dropout = probability("dropout", dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_projections(bias, bias if out_bias is None else out_bias, gate, factory)
        self.q_norm = None if qk_norm is None else qk_norm(self.head_dim).to(**factory)
        self.k_norm = None if qk_norm is None else qk_norm(self.head_dim).to(**factory)
        self.position = _checked_rule(position, self)
        self.sink = nn.Parameter(torch.zeros(heads, **factory)) if sink else None

    def _make_projections(self, bias: bool, out_bias: bool, gate: bool, factory: dict[str, Any]) -> None:
        queries, keys, values = self._widths
        joined = self.heads * self.value_dim
        if self.kv_model is None:
            self.qkv = nn.Linear(self.d_model, queries + keys + values, bias, **factory)
        else:
            self.q = nn.Linear(self.d_model, queries, bias, **factory)
            self.kv = nn.Linear(self.kv_model, keys + values, bias, **factory)
        self.gate = nn.Linear(self.d_model, joined, False, **factory) if gate else None
        self.out = nn.Linear(joined, self.d_model, out_bias, **factory)

    @hide_unknown
    def forward(
        self, x: Tensor, context: Context = None, *, mask: Mask | Tensor | None = None,
        lengths: Tensor | None = None, positions: Positions | None = None, cu_seqlens: Tensor | None = None,
        context_cu_seqlens: Tensor | None = None, cache: CacheLike | None = None, **unknown: Never,
    ) -> Tensor:  # fmt: skip
        """Computes attention from x to `context`, or from x to itself. The output has x's shape.

        Args:
            x: (B, L, d_model), (L, d_model), packed (total, d_model) with `cu_seqlens`, or nested
                (N, j, d_model).
            context: (B, Lk, kv_model), unbatched, packed or nested like x, or the result of
                `remember`. Default: x.
            mask: a mask or a bool tensor (True = may attend) that applies together with the
                module's mask. A tensor is (L, Lk), (B, L, Lk) or (B, heads or 1, L, Lk).
            lengths: (B,), the number of real tokens of each sample. The rest is padding.
            positions: positions of x for `Rotary`: an int (the first position), (L,) or (B, L).
                Default: 0, 1, ... in each sequence, or the positions that follow the cached tokens.
            cu_seqlens: (N + 1,), the cumulative sequence lengths of packed x.
            context_cu_seqlens: (N + 1,), the cumulative sequence lengths of a packed context.
            cache: a cache of `regard.cache`. The call appends the keys and values of x and attends
                causally to all cached tokens.
        """
        if unknown:
            raise unknown_keyword(Attention.forward, unknown)
        options = LayerOptions(mask, lengths, positions, cu_seqlens, context_cu_seqlens, cache)
        if is_nested("x", x):
            return self._forward_nested(x, options, **self._nested_context(context))
        self._check(x, context, options)
        q, k, v = self._projected(x, context)
        at = options.token_positions(x.shape[-2]) if isinstance(self.position, Rotary) else 0
        q, k = self._normed_and_rotated(q, k, at)
        allowed, dropout = self._mask_and_dropout(options)
        if cache is None:
            attended = self._attend((q, k, v), options, allowed, dropout)
        else:
            padding = {} if lengths is None else {"lengths": lengths}
            attended = cache.attend(q, k, v, mask=allowed, **padding, **self._options())
        joined = join_heads(attended)
        out: Tensor = self.out(joined if self.gate is None else joined * self.gate(x).sigmoid())
        return out

    def remember(self, context: Tensor) -> Memory:
        """Returns the keys and values of a context. Pass them as `context` in later calls."""
        self._check_context(context)
        return Memory(*self._keys(context))

    def arguments(self, x: Tensor, positions: Positions = 0) -> tuple[QKV, dict[str, Any]]:
        """Returns the arguments of `regard.attention` for x: (q, k, v) and the options.

        `regard.weights(*qkv, **options)` returns the weights of this layer. The options do not
        include dropout.
        """
        self._check(x, None, LayerOptions())
        q, k, v = self._projected(x, None)
        return (*self._normed_and_rotated(q, k, positions), v), {"mask": self.mask, **self._options()}

    def new_cache(self, B: int, capacity: int | None = None) -> KVCache:
        """Returns an empty `KVCache` for B samples, with the dtype and device of the weights."""
        if self.kv_model not in (None, self.d_model):
            raise ValueError(
                f"new_cache: expected self-attention, got kv_model = {self.kv_model}; `remember` projects "
                "a context once"
            )
        weight, sizes = self.out.weight, (self.kv_heads, self.head_dim, self.value_dim)
        return KVCache(B, *sizes, capacity=capacity, dtype=weight.dtype, device=weight.device)

    def _projected(self, x: Tensor, context: Context) -> QKV:
        """Projects x to q (..., Hq, L, D), and the context (default: x) to k and v.

        k is (..., Hkv, Lk, D), v is (..., Hkv, Lk, Dv).
        """
        if context is None and self.kv_model is None:
            q, k, v = self.qkv(x).split(self._widths, -1)
            return split_heads(q, self.heads), *self._normed_keys(k, v)
        q = split_heads(F.linear(x, *self._qkv_rows(0)) if self.kv_model is None else self.q(x), self.heads)
        return q, *(context if isinstance(context, Memory) else self._keys(x if context is None else context))

    def _keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        kv = F.linear(context, *self._qkv_rows(1)) if self.kv_model is None else self.kv(context)
        return self._normed_keys(*kv.split(self._widths[1:], -1))

    def _normed_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        return k if self.k_norm is None else self.k_norm(k), v

    def _qkv_rows(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of the weight and of the bias of `qkv` that compute some of its outputs.

        Index 0 selects the rows for queries, index 1 the rows for keys and values.
        """
        queries, keys, values = self._widths
        sizes, bias = (queries, keys + values), self.qkv.bias
        return self.qkv.weight.split(sizes)[index], None if bias is None else bias.split(sizes)[index]

    def _normed_and_rotated(self, q: Tensor, k: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
        """Normalises q and applies rotary embeddings to q and k. Shapes stay the same.

        k must have been normalised by `_normed_keys`.
        """
        q = q if self.q_norm is None else self.q_norm(q)
        if not isinstance(self.position, Rotary):
            return q, k
        cos, sin = self.position.table(q, at)
        layout, inplace = self.position.layout, self._may_overwrite(q, k)
        rotated_q = rotate(q, cos, sin, layout=layout, inplace=inplace)
        return rotated_q, rotate(k, cos, sin, layout=layout, inplace=inplace)

    def _may_overwrite(self, q: Tensor, k: Tensor) -> bool:
        """Returns whether q and k may be rotated in place.

        They may not if a gradient is recorded, if a projection has a hook, or if PyTorch compiles,
        traces or transforms the call.
        """
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
            raise TypeError("context: expected a nested tensor, like x, got a Memory")
        packed = packed_tokens("context", context, self._context_width)
        return {"context": packed.tokens, "context_cu_seqlens": packed.cu_seqlens}

    @property
    def _context_width(self) -> int:
        return self.d_model if self.kv_model is None else self.kv_model

    def _check(self, x: Tensor, context: Context, options: LayerOptions) -> None:
        options.check(x, context, self.d_model)
        cache = options.cache
        is_other_kind = isinstance(cache, LatentCache | LinearCache)
        if is_other_kind or not (cache is None or callable(getattr(cache, "attend", None))):
            raise TypeError(f"cache: expected a cache of keys and values, as from new_cache, got {cache!r}")
        if not isinstance(self.position, Rotary):
            options.refuse("without position=Rotary(...)", "positions")
        if context is None:
            if self.kv_model not in (None, self.d_model):
                raise ValueError(f"context: expected tokens of width kv_model = {self.kv_model}, got None")
            return
        if self.position is not None:
            raise ValueError("context: expected None with position, which is for self-attention")
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


# Constructors with the names that papers use


def SelfAttention(d_model: int, heads: int, **options: Any) -> Attention:
    """Returns an `Attention` for multi-head self-attention.

    `options` are further arguments of `Attention`.
    """
    return Attention(d_model, heads, **options)


def CrossAttention(d_model: int, heads: int, kv_model: int | None = None, **options: Any) -> Attention:
    """Returns an `Attention` for cross-attention to a context (B, Lk, kv_model).

    Call it as `attend(x, context)`. `kv_model` defaults to `d_model`. `options` are further
    arguments of `Attention`.
    """
    return Attention(d_model, heads, kv_model=d_model if kv_model is None else kv_model, **options)


def MultiQueryAttention(d_model: int, heads: int, **options: Any) -> Attention:
    """Returns an `Attention` with one key head for all query heads.

    `options` are further arguments of `Attention`.
    """
    return Attention(d_model, heads, kv_heads=1, **options)


def GroupedQueryAttention(d_model: int, heads: int, kv_heads: int, **options: Any) -> Attention:
    """Returns an `Attention` in which `heads / kv_heads` query heads share each key head.

    `options` are further arguments of `Attention`.
    """
    return Attention(d_model, heads, kv_heads=kv_heads, **options)
