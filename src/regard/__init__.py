"""Attention: every mechanism behind one call, exact, with no cliffs."""

from . import cache, convert, cost, facts, features, masks, nn, packing, positions, scores, see
from ._attention import attention, weights
from ._evidence import Evidence, evidence, rollout
from ._linear import linear_attention
from ._linear_problem import LinearState
from ._merge import merge
from ._meter import Comparison, compare_to_exact
from ._plan import Plan, plan
from .facts import (
    BlockMass,
    BlockMax,
    ColumnMass,
    DistanceHistogram,
    Entropy,
    MassOn,
    RowMax,
    Rows,
    TopK,
)

__all__ = [
    "BlockMass", "BlockMax", "ColumnMass", "Comparison", "DistanceHistogram", "Entropy", "Evidence",
    "LinearState", "MassOn", "Plan", "RowMax", "Rows", "TopK", "attention", "cache", "compare_to_exact",
    "convert", "cost", "evidence", "facts", "features", "linear_attention", "masks", "merge", "nn",
    "packing", "plan", "positions", "rollout", "scores", "see", "weights",
]  # fmt: skip
