"""`Attention`: `regard.attention` with projections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.types import Device

from .._api.projection import Linear, linear
from .._call.spec import QKV
from .._tools.arguments import count, probability
from .._tools.watching import is_watched
from .._tools.words import check_keywords, hide_unknown, unknown_keyword
from ..cache import KVCache, LatentCache, LinearCache
from ..masks import Mask
from ..positions import AlibiBias, Positions, Relative, Rotary, rotate
from ._context import ContextInputs
from ._layer import AttentionLayer
from ._nested import packed_tokens
from ._options import CacheLike, Context, LayerOptions, Memory, checked_mask, is_nested
from ._recorded import with_weights
from ._sizes import GroupedHeads, Run, join_heads, rows, split_heads

if TYPE_CHECKING:
    from ..distributed import SequenceParallel

Rule = Rotary | AlibiBias | Relative


class Attention(AttentionLayer, ContextInputs, GroupedHeads):
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
        value_model: width of the tokens `value`, if values are computed from other tokens than
            keys. With it, the module has three projections, `q`, `k` and `v`.
        bias: if True, the projections of queries, keys and values have biases.
        out_bias: if True, the output projection has a bias. Default: `bias`.
        qk_norm: factory of the norms of queries and keys, called as `qk_norm(head_dim)`. Example:
            `nn.RMSNorm`.
        position: a `positions.Rotary`, `positions.AlibiBias` or `positions.Relative`. Layers may
            share one object.
        mask: a mask for every call. Example: `masks.Causal()`.
        scale: multiplies q.k. Default: 1 / sqrt(head_dim).
        softcap: replaces a score s by softcap * tanh(s / softcap). Default: no softcap.
        sink: if True, the layer learns one sink logit per head: an extra entry of the softmax that
            has no value.
        dropout: dropout probability of the attention weights in training.
        gate: if True, the attention output is multiplied by the sigmoid of a projection of x before
            the output projection.
        out: if False, there is no output projection. The output is the concatenation of the heads,
            (B, L, heads * value_dim).
        device, dtype: device and dtype of the parameters. Default: PyTorch's defaults.

    Example:
        >>> rotary, causal = regard.positions.Rotary(64), regard.masks.Causal()
        >>> attend = regard.nn.Attention(512, 8, kv_heads=2, position=rotary, mask=causal)
        >>> attend(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])
    """

    _shown = (
        "heads", "kv_heads", "head_dim", "value_dim", "dropout", "kv_model", "value_model", "mask", "scale",
        "softcap",
    )  # fmt: skip

    @check_keywords
    def __init__(
        self, d_model: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, kv_model: int | None = None, value_model: int | None = None,
        bias: bool = True, out_bias: bool | None = None, qk_norm: Callable[[int], nn.Module] | None = None,
        position: Rule | None = None, mask: Mask | None = None, scale: float | None = None,
        softcap: float | None = None, sink: bool = False, dropout: float = 0.0, gate: bool = False,
        out: bool = True, device: Device = None, dtype: torch.dtype | None = None, **unknown: NoReturn,
    ) -> None:  # fmt: skip
        super().__init__(d_model, heads, kv_heads, head_dim, value_dim)
        self.kv_model = None if kv_model is None else count("kv_model", kv_model, 1)
        self.value_model = None if value_model is None else count("value_model", value_model, 1)
        self.scale, self.softcap, self.mask = scale, softcap, checked_mask(mask)
        self.dropout = probability("dropout", dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_projections(bias, factory)
        joined = self.heads * self.value_dim
        self.gate = Linear(d_model, joined, False, **factory) if gate else None
        out_bias = bias if out_bias is None else out_bias
        self.out: nn.Linear = Linear(joined, d_model, out_bias, **factory) if out else nn.Identity()  # type: ignore[assignment]
        self.q_norm = None if qk_norm is None else qk_norm(self.head_dim).to(**factory)
        self.k_norm = None if qk_norm is None else qk_norm(self.head_dim).to(**factory)
        self.position = _checked_rule(position, self)
        self.sink = nn.Parameter(torch.zeros(heads, **factory)) if sink else None

    def _make_projections(self, bias: bool, factory: dict[str, Any]) -> None:
        queries, keys, values = self._widths
        if self.value_model is not None:
            self.q = Linear(self.d_model, queries, bias, **factory)
            self.k = Linear(self._context_width, keys, bias, **factory)
            self.v = Linear(self.value_model, values, bias, **factory)
        elif self.kv_model is not None:
            self.q = Linear(self.d_model, queries, bias, **factory)
            self.kv = Linear(self.kv_model, keys + values, bias, **factory)
        else:
            self.qkv = Linear(self.d_model, queries + keys + values, bias, **factory)

    @property
    def _units(self) -> tuple[int, int]:
        return self.heads, self.kv_heads

    def _rows(self, heads: Run, kv_heads: Run) -> dict[str, list[Run]]:
        """Returns the rows of each projection that compute some heads, and the columns of `out`."""
        queries, keys, _ = self._widths
        q, joined = rows(heads, self.head_dim), rows(heads, self.value_dim)
        first_k, first_v = (0, keys) if self.kv_model is not None else (queries, queries + keys)
        first_k, first_v = (0, 0) if self.value_model is not None else (first_k, first_v)
        k, v = rows(kv_heads, self.head_dim, first_k), rows(kv_heads, self.value_dim, first_v)
        inputs = {"q": [q], "k": [k], "v": [v], "kv": [k, v], "qkv": [q, k, v]}
        return inputs | {"gate": [joined], "sink": [heads], "out": [joined]}

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The input projections: (qkv,), (q, kv) or (q, k, v)."""
        if self.value_model is not None:
            return self.q, self.k, self.v
        return (self.qkv,) if self.kv_model is None else (self.q, self.kv)

    @hide_unknown
    def forward(
        self, x: Tensor, context: Context = None, value: Tensor | None = None, *,
        mask: Mask | Tensor | None = None, lengths: Tensor | None = None, positions: Positions | None = None,
        cu_seqlens: Tensor | None = None, context_cu_seqlens: Tensor | None = None,
        cache: CacheLike | None = None, parallel: SequenceParallel | None = None,
        return_weights: bool = False, **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Computes attention from x to `context`, or from x to itself. The output has x's shape.

        Args:
            x: (B, L, d_model), (L, d_model), packed (total, d_model) with `cu_seqlens`, or nested
                (N, j, d_model).
            context: (B, Lk, kv_model), unbatched, packed or nested like x, or the result of
                `remember`. Default: x.
            value: the tokens from which values are computed, (B, Lk, value_model), in the form of
                `context`, from which only keys are then computed. Default: `context`.
            mask: a mask or a bool tensor (True = may attend) that applies together with the
                module's mask. A tensor is (L, Lk), (B, L, Lk) or (B, heads or 1, L, Lk).
            lengths: (B,), the number of real tokens of each sample. The rest is padding.
            positions: positions of x for `Rotary`: an int (the first position), (L,) or (B, L).
                Default: 0, 1, ... in each sequence, or the positions that follow the cached tokens.
            cu_seqlens: (N + 1,), the cumulative sequence lengths of packed x.
            context_cu_seqlens: (N + 1,), the cumulative sequence lengths of a packed context.
            cache: a cache of `regard.cache`. The call appends the keys and values of x and attends
                causally to all cached tokens.
            parallel: the ranks that share the sequence. x, `context`, `value` and the output are then
                this rank's shards, all other arguments those of the whole sequence.
            return_weights: if True, returns the pair (output, weights). The weights are those of
                `regard.weights` before dropout: (B, heads, L, Lk), (heads, L, Lk) if x is
                unbatched, and padded (N, heads, L, Lk) if x is packed or nested. They take
                L x Lk memory for each head.
        """
        if unknown:
            raise unknown_keyword(Attention.forward, unknown)
        options = LayerOptions(mask, lengths, positions, cu_seqlens, context_cu_seqlens, cache, parallel)
        if is_nested("x", x):
            nested = self._nested_context(context, value)
            return self._forward_nested(x, options, return_weights=return_weights, **nested)
        if return_weights:
            options.refuse("with return_weights", "parallel")
            output = partial(self.forward, x, context, value, **options._asdict())
            return with_weights(output, cu_seqlens, context_cu_seqlens)
        self._check(x, context, value, options)
        options = options.of_call(x, context)
        x, context, value = self._finite(x, context, value, options)
        q, k, v = self._projected(x, context, value)
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

    def remember(self, context: Tensor, value: Tensor | None = None) -> Memory:
        """Returns the keys and values of a context. Pass them as `context` in later calls.

        Values are computed from `value`. Default: the context.
        """
        self._check_context(context, value)
        if self._share is not None:
            context, value = self._share.inputs(context, value)
        return Memory(*self._keys(context, value))

    def arguments(
        self, x: Tensor, positions: Positions = 0, *, context: Context = None, value: Tensor | None = None
    ) -> tuple[QKV, dict[str, Any]]:
        """Returns the arguments of `regard.attention` for x: (q, k, v) and the options.

        `regard.weights(*qkv, **options)` returns the weights of this layer. The options do not
        include dropout.
        """
        self._check(x, context, value, LayerOptions())
        q, k, v = self._projected(x, context, value)
        return (*self._normed_and_rotated(q, k, positions), v), {"mask": self.mask, **self._options()}

    def new_cache(self, B: int, capacity: int | None = None) -> KVCache:
        """Returns an empty `KVCache` for B samples, with the dtype and device of the weights."""
        for name in ("kv_model", "value_model"):
            width = getattr(self, name)
            if width not in (None, self.d_model):
                raise ValueError(
                    f"new_cache: expected self-attention, got {name} = {width}; `remember` projects "
                    "a context once"
                )
        weight, sizes = self.projections[0].weight, (self.kv_heads, self.head_dim, self.value_dim)
        return KVCache(B, *sizes, capacity=capacity, dtype=weight.dtype, device=weight.device)

    def _finite(
        self, x: Tensor, context: Context, value: Tensor | None, options: LayerOptions
    ) -> tuple[Tensor, Context, Tensor | None]:
        """Replaces padding that has NaN or Inf by zeros. Returns x, context and value."""
        if context is None:
            return options.finite(x, self.mask), None, None
        if isinstance(context, Tensor):
            context = options.finite(context, self.mask)
        return x, context, None if value is None else options.finite(value, self.mask)

    def _projected(self, x: Tensor, context: Context, value: Tensor | None = None) -> QKV:
        """Projects x to q (..., Hq, L, D), and the context (default: x) to k and v.

        k is (..., Hkv, Lk, D), v is (..., Hkv, Lk, Dv). Values are computed from `value` (default:
        the context).
        """
        packed = self.kv_model is None and self.value_model is None
        if context is None and packed:
            q, k, v = self.qkv(x).split(self._widths, -1)
            return split_heads(q, self.heads), *self._normed_keys(k, v)
        q = split_heads(linear(x, *self._qkv_rows()[0]) if packed else self.q(x), self.heads)
        if isinstance(context, Memory):
            return q, *context
        return q, *self._keys(x if context is None else context, value)

    def _keys(self, context: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns normalised k (..., Hkv, Lk, D) of the context, and v (..., Hkv, Lk, Dv)."""
        _, keys, values = self._widths
        if self.value_model is not None:
            return self._normed_keys(self.k(context), self.v(context if value is None else value))
        if value is None:
            kv = linear(context, *self._qkv_rows()[1]) if self.kv_model is None else self.kv(context)
            return self._normed_keys(*kv.split((keys, values), -1))
        weight, bias = self._qkv_rows()[1] if self.kv_model is None else (self.kv.weight, self.kv.bias)
        k_row, v_row = _split_rows(weight, bias, keys)
        return self._normed_keys(linear(context, *k_row), linear(value, *v_row))

    def _qkv_rows(self) -> tuple[LinearRows, LinearRows]:
        """Splits weight and bias of `qkv` into the rows for queries and for keys and values."""
        return _split_rows(self.qkv.weight, self.qkv.bias, self._widths[0])

    def _normed_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        return k if self.k_norm is None else self.k_norm(k), v

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
        hooked = any(p._forward_hooks for p in self.projections)
        return not (q.requires_grad or k.requires_grad or hooked or is_watched(q, k, q))

    def _options(self) -> dict[str, Any]:
        bias = self.position() if isinstance(self.position, (AlibiBias, Relative)) else None
        bias = bias if bias is None or self._share is None else self._share.bias(bias)
        return {"scale": self.scale, "softcap": self.softcap, "sink": self.sink, "bias": bias}

    def _nested_context(self, context: Context, value: Tensor | None) -> dict[str, Tensor]:
        if context is None and value is None:
            return {}
        self._check_forms(context, value)
        if isinstance(context, Memory):
            raise TypeError("context: expected a nested tensor, like x, got a Memory")
        packed = packed_tokens("context", context, self._context_width)
        inputs = {"context": packed.tokens, "context_cu_seqlens": packed.cu_seqlens}
        if value is None:
            return inputs
        values = packed_tokens("value", value, self._value_width)
        if not torch.equal(values.cu_seqlens, packed.cu_seqlens):
            raise ValueError("value: expected sequences of the same lengths as context, got other lengths")
        return inputs | {"value": values.tokens}

    def _check(self, x: Tensor, context: Context, value: Tensor | None, options: LayerOptions) -> None:
        options.check(x, context, self.d_model)
        cache = options.cache
        is_other_kind = isinstance(cache, LatentCache | LinearCache)
        if is_other_kind or not (cache is None or callable(getattr(cache, "attend", None))):
            raise TypeError(f"cache: expected a cache of keys and values, as from new_cache, got {cache!r}")
        if not isinstance(self.position, Rotary):
            options.refuse("without position=Rotary(...)", "positions")
        if context is not None and self.position is not None:
            raise ValueError("context: expected None with position, which is for self-attention")
        self._check_inputs(context, value)


LinearRows = tuple[Tensor, Tensor | None]  # weight and bias of some output channels


def _split_rows(weight: Tensor, bias: Tensor | None, first: int) -> tuple[LinearRows, LinearRows]:
    """Splits a linear layer into its first `first` output channels and the others."""
    sizes = (first, len(weight) - first)
    biases = (None, None) if bias is None else bias.split(sizes)
    one, two = zip(weight.split(sizes), biases, strict=True)
    return one, two


# Arguments


def _checked_rule(position: Rule | None, module: Attention) -> Rule | None:
    if position is not None and not isinstance(position, Rotary | AlibiBias | Relative):
        raise TypeError(f"position: expected Rotary, AlibiBias or Relative, got {position!r}")
    if isinstance(position, Rotary) and position.dims > module.head_dim:
        raise ValueError(f"position: expected dims up to head_dim = {module.head_dim}, got {position.dims}")
    if isinstance(position, (AlibiBias, Relative)) and position().heads != module.heads:
        raise ValueError(f"position: expected heads = {module.heads}, got {position().heads}")
    return position
