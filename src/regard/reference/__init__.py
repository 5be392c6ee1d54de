"""The specification: attention as the formula says it, in float64, n x n, with torch alone.

Everything else in the library is measured against this package.
"""

from .evidence import evidence
from .formula import forward, reasons, weights
from .linear import linear

__all__ = ["evidence", "forward", "linear", "reasons", "weights"]
