"""The explorer: attention in a browser, from this machine or as one file. Needs the extra `explore` to serve."""

from ._make import captured as captured
from ._make import tensors as tensors
from ._make import text as text
from .explorer import Explorer as Explorer
