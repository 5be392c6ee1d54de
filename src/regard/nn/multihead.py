"""A drop-in replacement for `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.types import Device

from .. import packing
from .._api.attention import attention
from .._api.projection import Linear, linear
from .._call.spec import QKV
from .._tools.arguments import probability
from ..masks import Arguments, Causal, Lengths, Mask
from ._lengths import real_tokens
from ._module import CheckedModule
from ._nested import PackedTokens, packed_tokens
from ._options import is_nested
from ._padding import finite_where
from ._torch_masks import TorchMask, arguments, padding_of_keys
from ._weights import attend_with_weights, dense_weights


class MultiheadAttention(CheckedModule, torch.nn.MultiheadAttention):
    """A drop-in replacement for `torch.nn.MultiheadAttention` that uses Regard's kernels.

    Arguments, results, parameter names and initialisation are PyTorch's. Differences:
    - The attention output of a fully masked query is zero (before `out_proj`), and so are its
      weights. They are never NaN.
    - `is_causal=True` needs no `attn_mask`. If there is one, both restrictions apply.
    - `attn_mask` may also be (B, Lq, Lk) or (B, heads or 1, Lq, Lk).
    - `attn_mask` and `key_padding_mask` may be a `regard.masks.Mask`, which says which keys a query
      **may** attend to, as everywhere in Regard. Bool tensors keep PyTorch's opposite meaning.
    - A float mask that holds only zeros and ones raises, because it is probably a bool mask.
    - Weights are returned before dropout. Lq x Lk matrices are allocated only if weights
      are returned: one matrix per sample if weights are averaged and no gradient is recorded, else
      one matrix per sample and head.
    - Nested tensors of both layouts are supported in training, also in cross-attention.
    - `load_state_dict` checks all names and shapes before it copies a tensor.

    Example:
        >>> attend = regard.nn.MultiheadAttention(512, 8, batch_first=True)
        >>> x = torch.randn(2, 100, 512)
        >>> out, _ = attend(x, x, x, need_weights=False, is_causal=True)
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
        add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None,
        vdim: int | None = None, batch_first: bool = False, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if num_heads > 0 and embed_dim % num_heads:
            raise ValueError(f"embed_dim: expected a multiple of num_heads = {num_heads}, got {embed_dim}")
        super().__init__(
            embed_dim, num_heads, probability("dropout", dropout), bias, add_bias_kv, add_zero_attn, kdim,
            vdim, batch_first, device, dtype,
        )  # fmt: skip
        self.out_proj.__class__ = Linear  # type: ignore[assignment]
        self.register_forward_pre_hook(no_fast_path)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | Mask | None = None,
        need_weights: bool = True, attn_mask: Tensor | Mask | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Returns the attention output, in the shape of `query`, and the weights or None.

        Args:
            query: (Lq, B, E), (B, Lq, E) with `batch_first`, (Lq, E), or nested (B, j, E).
            key: as `query`, with Lk tokens of width `kdim`.
            value: as `query`, with Lk tokens of width `vdim`.
            key_padding_mask: (B, Lk) or (Lk,). Bool: True = **ignore** this key. Float: added to
                the scores. Or a `Mask`.
            need_weights: if True, returns the weights (B, Lq, Lk), averaged over heads.
            attn_mask: (Lq, Lk), (B * heads, Lq, Lk), (B, Lq, Lk) or (B, heads or 1, Lq, Lk). Bool:
                True = may **not** attend. Float: added to the scores. Or a `Mask`.
            average_attn_weights: if False, the weights are (B, heads, Lq, Lk), one matrix per head.
            is_causal: if True, query i attends only to keys 0 to i. Masks apply as well.
        """
        if is_nested("query", query):
            if attn_mask is not None or key_padding_mask is not None:
                name = "attn_mask" if attn_mask is not None else "key_padding_mask"
                raise ValueError(f"{name}: expected None with nested tensors, got a mask")
            return self._nested(query, key, value, need_weights, average_attn_weights, is_causal)
        is_batched = self._checked(query, key, value)
        if not is_batched:
            query, key, value = _unsqueezed(query, key, value, self._batch)
            if isinstance(key_padding_mask, Tensor):
                key_padding_mask = key_padding_mask.unsqueeze(0)
        query, key, value = self._finite(query, key, value, key_padding_mask, attn_mask)
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        k, v, extra = self._with_extra_keys(k, v)
        options = arguments(attn_mask, key_padding_mask, is_causal, q, k.shape[2] - extra, extra)
        dropout, w = self.dropout if self.training else 0.0, None
        if need_weights:
            out, w = attend_with_weights((q, k, v), options, dropout, average_attn_weights)
        else:
            out = attention(q, k, v, dropout=dropout, **options._asdict())
        out = self.out_proj(self._joined(out))
        if is_batched:
            return out, w
        return out.squeeze(self._batch), None if w is None else w.squeeze(0)

    @property
    def _batch(self) -> int:
        """The index of the batch dimension."""
        return 0 if self.batch_first else 1

    def _finite(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: TorchMask, attn_mask: TorchMask
    ) -> QKV:
        """Replaces padding that has NaN or Inf by zeros, for the gradients of the weights.

        The queries of self-attention are the keys, and have the same padding. Arguments that are the
        same tensor stay the same tensor.
        """
        padding = padding_of_keys(
            key if self.batch_first else key.transpose(0, 1), key_padding_mask, attn_mask
        )
        if padding is None:
            return query, key, value
        padding = padding if self.batch_first else padding.mT
        k = finite_where(padding, key)
        v = k if value is key else finite_where(padding, value)
        return k if query is key else query, k, v

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> QKV:
        """Returns q, k, v (..., H, D).

        If key and value (or all three) are the same tensor, one matrix product projects them.
        """
        W, b, E = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if W is not None and query is key and key is value:
            q, k, v = self._split(linear(query, W, b), 3)
            return q, k, v
        if W is not None and key is value:
            Wq, Wkv = W.split((E, 2 * E))
            bq, bkv = (None, None) if b is None else b.split((E, 2 * E))
            k, v = self._split(linear(key, Wkv, bkv), 2)
            return self._split(linear(query, Wq, bq))[0], k, v
        matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if W is None else W.chunk(3)
        linears = zip((query, key, value), matrices, (None,) * 3 if b is None else b.chunk(3), strict=True)
        q, k, v = (self._split(linear(*layer))[0] for layer in linears)
        return q, k, v

    def _split(self, x: Tensor, n: int = 1) -> tuple[Tensor, ...]:
        """Splits (..., n * H * D) into n views (..., H, D)."""
        return x.unflatten(-1, (n, self.num_heads, self.head_dim)).unbind(-3)  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        """Moves heads before tokens: (B, L, H, D) or (L, B, H, D) -> (B, H, L, D), a view."""
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _joined(self, x: Tensor) -> Tensor:
        """Concatenates the heads' channels: (B, H, L, D) -> (B, L, H * D) or (L, B, H * D)."""
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(2)

    def _with_extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Appends the keys and values of `add_bias_kv` and `add_zero_attn` to k and v.

        Returns the new k, the new v, and the number of appended keys.
        """
        extra: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            shape = (1, self.num_heads, 1, self.head_dim)
            extra.append((self.bias_k.view(shape), self.bias_v.view(shape)))
        if self.add_zero_attn:
            extra.append((k.new_zeros(1, 1, 1, 1), v.new_zeros(1, 1, 1, 1)))
        if not extra:
            return k, v, 0
        shape = (*k.shape[:2], 1, k.shape[3])
        k = torch.cat([k, *(key.to(k.dtype).expand(shape) for key, _ in extra)], 2)
        return k, torch.cat([v, *(value.to(v.dtype).expand(shape) for _, value in extra)], 2), len(extra)

    def _checked(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Checks the shapes. Returns whether the inputs have a batch dimension."""
        inputs = ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)
        for name, x, width in inputs:
            if is_nested(name, x) or x.dim() != query.dim() or x.dim() not in (2, 3) or x.shape[-1] != width:
                expected = f"(L, {width}) or a batch of it, like the others"
                raise ValueError(f"{name}: expected {expected}, got {_shapes(*inputs)}")
        batch = self._batch
        if query.dim() == 3 and not query.shape[batch] == key.shape[batch] == value.shape[batch]:
            expected = f"one batch in dim {batch} (batch_first={self.batch_first})"
            raise ValueError(f"query, key, value: expected {expected}, got {_shapes(*inputs)}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"value: expected as many tokens as key, got {_shapes(*inputs)}")
        return query.dim() == 3

    def _nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention over nested query (N, jq, E), key (N, jk, Ek) and value (N, jk, Ev).

        The output is nested (N, jq, E). The weights are padded tensors: (N, Lq, Lk) if `average`,
        else (N, H, Lq, Lk).
        """
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError("add_bias_kv, add_zero_attn: expected False with nested tensors, got True")
        queries = packed_tokens("query", query, self.embed_dim)
        keys = queries if key is query else packed_tokens("key", key, self.kdim)
        values = keys if value is key else packed_tokens("value", value, self.vdim)
        _check_lengths(queries, keys, values)
        q, k, v = self._projected(queries.tokens, keys.tokens, values.tokens)
        dropout, is_cross = self.dropout if self.training else 0.0, keys is not queries
        out = packing.varlen_attention(
            q, k, v, queries.cu_seqlens, keys.cu_seqlens if is_cross else None, dropout=dropout,
            mask=Causal() if is_causal else None, offset=0 if is_causal and is_cross else None,
        )  # fmt: skip
        w = None
        if need_weights:
            w = _padded_weights((q, queries.cu_seqlens), (k, keys.cu_seqlens), is_causal)
            w = w.mean(1) if average else w
        return queries.nested(self.out_proj(out.flatten(1))), w


def _check_lengths(query: PackedTokens, key: PackedTokens, value: PackedTokens) -> None:
    n_query, n_key = len(query.cu_seqlens) - 1, len(key.cu_seqlens) - 1
    if n_query != n_key:
        raise ValueError(f"key: expected as many sequences as query, {n_query}, got {n_key}")
    if value is not key and not torch.equal(key.cu_seqlens, value.cu_seqlens):
        raise ValueError("value: expected sequences of the same lengths as key, got other lengths")


def _padded_weights(queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], is_causal: bool) -> Tensor:
    """Returns the weights of packed sequences as a padded tensor (N, H, Lq, Lk).

    `queries` and `keys` are pairs of packed rows (total, H, D) and cu_seqlens (N + 1,). Padded rows
    and columns of the result are zero.
    """
    q, k = (packing.unpack(x.transpose(0, 1), cu_seqlens) for x, cu_seqlens in (queries, keys))
    real = Lengths(packing.lengths(keys[1]))
    options = Arguments(real & Causal(), offset=0) if is_causal else Arguments(real)
    return dense_weights(q, k, options) * real_tokens(packing.lengths(queries[1]), q)


def no_fast_path(module: torch.nn.Module, args: Any) -> None:
    """A forward pre-hook that does nothing. Its presence disables PyTorch's fast path.

    In evaluation mode, `nn.TransformerEncoderLayer` runs a fused kernel instead of its attention
    module, unless the module has hooks.
    """


def _unsqueezed(query: Tensor, key: Tensor, value: Tensor, dim: int) -> QKV:
    """Adds a batch dim at `dim`. Arguments that are the same tensor stay the same tensor."""
    q = query.unsqueeze(dim)
    k = q if key is query else key.unsqueeze(dim)
    return q, k, k if value is key else value.unsqueeze(dim)


def _shapes(*inputs: tuple[str, Tensor, int]) -> str:
    return ", ".join(f"{name} {'nested' if x.is_nested else tuple(x.shape)}" for name, x, _ in inputs)
