"""Attention: every mechanism behind one call, exact, with no cliffs."""

from . import masks, packing, scores
from ._attention import attention, weights
from ._plan import Plan, plan

__all__ = ["Plan", "attention", "masks", "packing", "plan", "scores", "weights"]
