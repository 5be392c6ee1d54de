"""Attention: every mechanism behind one call, exact, with no cliffs."""

from . import cache, convert, masks, nn, packing, positions, scores
from ._attention import attention, weights
from ._merge import merge
from ._plan import Plan, plan

__all__ = [
    "Plan", "attention", "cache", "convert", "masks", "merge", "nn", "packing", "plan", "positions", "scores",
    "weights",
]  # fmt: skip
