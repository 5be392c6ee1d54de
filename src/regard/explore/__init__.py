"""The explorer: attention in a browser, served by this machine (extra `explore`) or as one file."""

from ._make import Estimate as Estimate
from ._make import captured as captured
from ._make import estimate as estimate
from ._make import tensors as tensors
from ._make import text as text
from .explorer import Explorer as Explorer
