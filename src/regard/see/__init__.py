"""Records and draws what each attention head of a model does, without storing n x n weights."""

from ._capture import Capture as Capture, capture as capture, read as read, record as record
from ._curves import (
    distances as distances,
    entropy as entropy,
    mask as mask,
    rollout as rollout,
    token as token,
)
from ._layer import Head as Head, Key as Key, Layer as Layer, Link as Link
from ._maps import entropy_map as entropy_map, grid as grid, heatmap as heatmap
from ._roles import ROLES as ROLES, Role as Role
