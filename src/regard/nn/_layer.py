"""`AttentionLayer`: base class of `Attention` and `LatentAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import packing
from .._api.attention import attention
from .._call.spec import QKV
from ..masks import Causal, Lengths, Mask
from ..masks._both import both
from ._module import CheckedModule
from ._nested import packed_tokens
from ._options import LayerOptions

CAUSAL = Causal()


class AttentionLayer(CheckedModule):
    """A layer with a mask and dropout that takes batched, packed or nested tokens."""

    d_model: int
    mask: Mask | None
    dropout: float

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Computes attention without projections, with the layer's scale, softcap, sink and bias.

        q (..., Hq, L, D), k (..., Hkv, Lk, D), v (..., Hkv, Lk, Dv) -> (..., Hq, L, Dv).
        Subclasses may override it.
        """
        out: Tensor = attention(q, k, v, mask=mask, dropout=dropout, **self._options())
        return out

    def _options(self) -> dict[str, Any]:
        """Returns the layer's options for `regard.attention`, without mask and dropout."""
        raise NotImplementedError

    def _mask_and_dropout(self, options: LayerOptions) -> tuple[Mask | None, float]:
        """Returns the mask and the dropout of a call. With a cache, the causal mask is implied."""
        mask, dropout = both(self.mask, options.mask), self.dropout if self.training else 0.0
        if options.cache is None:
            return mask if options.lengths is None else both(mask, Lengths(options.lengths)), dropout
        if dropout:
            raise ValueError("cache: expected None in training with dropout; call eval() first")
        return None if mask == CAUSAL else mask, dropout

    def _attend(self, qkv: QKV, options: LayerOptions, mask: Mask | None, dropout: float) -> Tensor:
        """Computes attention over batched (..., H, L, D) or packed (H, total, D) heads."""
        if options.cu_seqlens is None:
            return self.attend(*qkv, mask=mask, dropout=dropout)
        q, k, v = (t.transpose(0, 1) for t in qkv)
        cu_q, cu_k, layer = options.cu_seqlens, options.context_cu_seqlens, self._options()
        packed: Tensor = packing.varlen_attention(q, k, v, cu_q, cu_k, mask=mask, dropout=dropout, **layer)
        return packed.transpose(0, 1)

    def _forward_nested(self, x: Tensor, options: LayerOptions, **keywords: Any) -> Tensor:
        """Packs nested x (N, j, d_model), calls `forward`, and returns a nested tensor."""
        options.refuse("with nested tensors", "lengths", "cu_seqlens", "context_cu_seqlens", "cache")
        packed = packed_tokens("x", x, self.d_model)
        shared = {"mask": options.mask, "positions": options.positions, "cu_seqlens": packed.cu_seqlens}
        return packed.nested(self(packed.tokens, **shared, **keywords))
