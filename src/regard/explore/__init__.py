"""The explorer: attention in a browser, served by this machine (extra `explore`) or as one file."""

from ._make import (
    Estimate as Estimate,
    captured as captured,
    estimate as estimate,
    tensors as tensors,
    text as text,
)
from .explorer import Explorer as Explorer
