"""Attention: every mechanism behind one call, exact, with no cliffs."""

from . import masks, nn, packing, positions, scores
from ._attention import attention, weights
from ._plan import Plan, plan

__all__ = ["Plan", "attention", "masks", "nn", "packing", "plan", "positions", "scores", "weights"]
