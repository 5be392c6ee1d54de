"""KV caches. `cache.attend(q, k, v)` appends k and v, then attends causally."""

from ._kv import KVCache as KVCache
from ._latent import LatentCache as LatentCache
from ._linear import LinearCache as LinearCache
from ._paged import PagedCache as PagedCache
from ._quantization_error import (
    QuantizationError as QuantizationError,
    quantization_error as quantization_error,
)
from ._quantized import QuantizedCache as QuantizedCache
from ._sliding import SlidingCache as SlidingCache
