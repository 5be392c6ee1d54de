"""Regard: attention for PyTorch. `regard.attention` computes every exact variant with one call."""

from . import cache, convert, cost, facts, features, masks, nn, packing, positions, scores, see
from ._api.attention import attention, weights
from ._api.evidence import Evidence, evidence, rollout
from ._api.linear_attention import linear_attention
from ._api.merge import merge
from ._api.meter import Comparison, compare_to_exact
from ._api.plan import Plan, plan
from ._call.linear import LinearState
from .facts import BlockMass, BlockMax, ColumnMass, DistanceHistogram, Entropy, MassOn, RowMax, Rows, TopK

__all__ = [
    "BlockMass", "BlockMax", "ColumnMass", "Comparison", "DistanceHistogram", "Entropy", "Evidence",
    "LinearState", "MassOn", "Plan", "RowMax", "Rows", "TopK", "attention", "cache", "compare_to_exact",
    "convert", "cost", "evidence", "facts", "features", "linear_attention", "masks", "merge", "nn",
    "packing", "plan", "positions", "rollout", "scores", "see", "weights",
]  # fmt: skip
