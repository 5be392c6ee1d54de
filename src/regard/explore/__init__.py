"""The explorer: shows attention in a browser, from a local server (extra `explore`) or from one file."""

from ._make import (
    Estimate as Estimate,
    captured as captured,
    estimate as estimate,
    tensors as tensors,
    text as text,
)
from .explorer import Explorer as Explorer
