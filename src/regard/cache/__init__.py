"""Caches for decoding. Each owns its positions, lengths and mask: `cache.attend(q, k, v)` is a step."""

from ._dense import KVCache as KVCache
from ._latent import LatentCache as LatentCache
from ._linear import LinearCache as LinearCache
from ._paged import PagedCache as PagedCache
from ._quantize import QuantizationError as QuantizationError
from ._quantize import quantization_error as quantization_error
from ._quantized import QuantizedCache as QuantizedCache
from ._sliding import SlidingCache as SlidingCache
