"""Attention: every mechanism behind one call, exact, with no cliffs."""

from . import cache, convert, cost, features, masks, nn, packing, positions, scores
from ._attention import attention, weights
from ._linear import linear_attention
from ._linear_problem import LinearState
from ._merge import merge
from ._meter import Comparison, compare_to_exact
from ._plan import Plan, plan

__all__ = [
    "Comparison", "LinearState", "Plan", "attention", "cache", "compare_to_exact", "convert", "cost",
    "features", "linear_attention", "masks", "merge", "nn", "packing", "plan", "positions", "scores",
    "weights",
]  # fmt: skip
