"""Attention: every mechanism behind one call, exact, with no cliffs."""

from . import cache, masks, packing, scores
from ._attention import attention, weights
from ._merge import merge
from ._plan import Plan, plan

__all__ = ["Plan", "attention", "cache", "masks", "merge", "packing", "plan", "scores", "weights"]
