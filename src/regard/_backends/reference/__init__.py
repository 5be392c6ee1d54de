"""The reference backend: the formulas in float64 PyTorch, with the full n x n matrix of weights.

It is the specification: tests compare every other implementation with it.
"""

from .attention import forward, reasons, weights
from .evidence import evidence
from .linear import linear

__all__ = ["evidence", "forward", "linear", "reasons", "weights"]
