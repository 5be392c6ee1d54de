"""The specification: attention as the formula says it, in float64, n x n, with torch alone.

Everything else in the library is measured against this package.
"""

from .attention import forward, reasons, weights
from .evidence import evidence
from .linear import linear

__all__ = ["evidence", "forward", "linear", "reasons", "weights"]
