"""The specification: attention as the formula says it, in float64, n x n, with torch alone.

Everything else in the library is measured against this package.
"""

from .formula import forward, reasons, weights
from .linear import linear

__all__ = ["forward", "linear", "reasons", "weights"]
