"""Records and draws what each attention head of a model does, without storing all L x L weights."""

from ._capture import Capture, capture, read, record
from ._curves import distances, entropy, mask, rollout, token
from ._layer import Head, Key, Layer, Link
from ._maps import entropy_map, grid, heatmap
from ._roles import ROLES, Role
from ._shapes import shapes
from ._weights import from_weights

__all__ = [
    "ROLES", "Capture", "Head", "Key", "Layer", "Link", "Role", "capture", "distances", "entropy",
    "entropy_map", "from_weights", "grid", "heatmap", "mask", "read", "record", "rollout", "shapes", "token",
]  # fmt: skip
