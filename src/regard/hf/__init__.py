"""Hugging Face Transformers: `attn_implementation="regard"`, and a cache. Needs the extra `hf`."""

from ._cache import Cache as Cache
from ._register import register as register
