"""KV caches. `cache.attend(q, k, v)` appends k and v to the cache, then attends causally."""

from ._kv import KVCache
from ._latent import LatentCache
from ._linear import LinearCache
from ._paged import PagedCache
from ._quantization_error import QuantizationError, quantization_error
from ._quantized import QuantizedCache
from ._sliding import SlidingCache

__all__ = [
    "KVCache", "LatentCache", "LinearCache", "PagedCache", "QuantizationError", "QuantizedCache",
    "SlidingCache", "quantization_error",
]  # fmt: skip
