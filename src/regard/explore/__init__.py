"""The explorer: shows attention in a browser, from a local server (extra `explore`) or from one file."""

from ._make import Estimate, captured, estimate, tensors, text
from .explorer import Explorer

__all__ = ["Estimate", "Explorer", "captured", "estimate", "tensors", "text"]
