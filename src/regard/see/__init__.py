"""Looking at attention: what each head of a model does, recorded without the n x n weights, and drawn."""

from ._capture import Capture as Capture
from ._capture import capture as capture
from ._capture import read as read
from ._capture import record as record
from ._curves import distances as distances
from ._curves import entropy as entropy
from ._curves import mask as mask
from ._curves import rollout as rollout
from ._curves import token as token
from ._layer import Head as Head
from ._layer import Key as Key
from ._layer import Layer as Layer
from ._layer import Link as Link
from ._maps import entropy_map as entropy_map
from ._maps import grid as grid
from ._maps import heatmap as heatmap
from ._roles import ROLES as ROLES
from ._roles import Role as Role
