"""Attention: every mechanism behind one call, exact, with no cliffs."""

from . import cache, convert, masks, nn, packing, positions, scores
from ._attention import attention, weights
from ._linear import linear_attention
from ._linear_problem import LinearState
from ._merge import merge
from ._plan import Plan, plan

__all__ = [
    "LinearState", "Plan", "attention", "cache", "convert", "linear_attention", "masks", "merge", "nn",
    "packing", "plan", "positions", "scores", "weights",
]  # fmt: skip
