"""Attention implementation "regard" and a cache for Transformers models. Needs the extra `hf`."""

try:
    from ._accelerate import Acceleration as Acceleration, accelerate as accelerate, restore as restore
    from ._cache import Cache as Cache
    from ._register import register as register
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ImportError("regard.hf needs Transformers: pip install 'regard[hf]'") from error

register()
