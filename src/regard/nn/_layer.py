"""`AttentionLayer`: base class of `Attention` and `LatentAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import packing
from .._api.attention import attention
from .._call.spec import QKV
from ..masks import Causal, Lengths, Mask
from ..masks._both import both
from ._module import CheckedModule
from ._nested import packed_tokens
from ._options import LayerOptions
from ._parallel import attend_shards

if TYPE_CHECKING:
    from ..distributed._share import LayerShare

CAUSAL = Causal()


class AttentionLayer(CheckedModule):
    """An attention layer with a mask and dropout. Its input is batched, packed or nested tokens."""

    d_model: int
    mask: Mask | None
    dropout: float
    _share: LayerShare | None = None  # with tensor parallelism

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Computes attention without projections, with the layer's scale, softcap, sink and bias.

        q (..., Hq, L, D), k (..., Hkv, Lk, D), v (..., Hkv, Lk, Dv) -> (..., Hq, L, Dv).
        Subclasses may override this method.
        """
        function: Any = attention if self._share is None else self._share.attention
        out: Tensor = function(q, k, v, mask=mask, dropout=dropout, **self._options())
        return out

    def _options(self) -> dict[str, Any]:
        """Returns the layer's options for `regard.attention`, except mask and dropout."""
        raise NotImplementedError

    def _mask_and_dropout(self, options: LayerOptions) -> tuple[Mask | None, float]:
        """Returns the mask and the dropout probability of a call.

        With a cache, a causal mask becomes None, because caches always attend causally.
        """
        mask, dropout = both(self.mask, options.sample_mask()), self.dropout if self.training else 0.0
        mask = mask if self._share is None else self._share.mask(mask)
        if options.cache is None:
            return mask if options.lengths is None else both(mask, Lengths(options.lengths)), dropout
        if dropout:
            raise ValueError("cache: expected None in training with dropout; call eval() first")
        return None if mask == CAUSAL else mask, dropout

    def _attend(self, qkv: QKV, options: LayerOptions, mask: Mask | None, dropout: float) -> Tensor:
        """Computes attention of q, k, v that are batched (..., H, L, D) or packed (H, total, D)."""
        if options.parallel is not None:
            cu_seqlens = options.cu_seqlens, options.context_cu_seqlens
            layer = {"mask": mask, "dropout": dropout, **self._options()}
            layer |= {} if self._share is None else self._share.dropout(dropout)
            return attend_shards(options.parallel, options.parallel.attention, qkv, cu_seqlens, layer)
        if options.cu_seqlens is None:
            return self.attend(*qkv, mask=mask, dropout=dropout)
        cu_q, cu_k, layer = options.cu_seqlens, options.context_cu_seqlens, self._options()
        if self._share is not None:
            return self._share.packed(qkv, cu_q, cu_k, mask=mask, dropout=dropout, **layer)
        q, k, v = (t.transpose(0, 1) for t in qkv)
        packed: Tensor = packing.varlen_attention(q, k, v, cu_q, cu_k, mask=mask, dropout=dropout, **layer)
        return packed.transpose(0, 1)

    def _forward_nested(
        self, x: Tensor, options: LayerOptions, **keywords: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Applies the layer to a nested tensor x (N, j, d_model) and returns one of the same shape.

        j is the jagged dim. Packs x, calls `forward` on the packed tokens, and unpacks the result.
        With `return_weights`, also returns the padded weights (N, H, Lq, Lk).
        """
        options.refuse(
            "with nested tensors", "lengths", "cu_seqlens", "context_cu_seqlens", "cache", "parallel"
        )
        packed = packed_tokens("x", x, self.d_model)
        shared = {"mask": options.mask, "positions": options.positions, "cu_seqlens": packed.cu_seqlens}
        result = self(packed.tokens, **shared, **keywords)
        return (packed.nested(result[0]), result[1]) if isinstance(result, tuple) else packed.nested(result)
