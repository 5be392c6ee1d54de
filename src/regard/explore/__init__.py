"""The explorer: shows attention in a browser, from a local server or from one file.

The server needs the extra `explore`.
"""

from ._make import Estimate, captured, estimate, tensors, text, weights
from .explorer import Explorer

__all__ = ["Estimate", "Explorer", "captured", "estimate", "tensors", "text", "weights"]
