"""Conversion of attention modules: from PyTorch to Regard, and from MHA to GQA or MLA."""

from ._files import load, origin, save
from ._grouped import to_grouped
from ._latent import to_latent
from ._layers import ModelReport, convert_layers
from ._needle import Needle
from ._origin import Origin, digest
from ._replace import replace_attention, replaced_attention, restore_attention
from ._report import Errors, Point, Report, Spectrum, Step
from ._sdpa import sdpa, use_sdpa
from ._textbook import from_textbook
from ._verify import Verification, verify

__all__ = [
    "Errors", "ModelReport", "Needle", "Origin", "Point", "Report", "Spectrum", "Step", "Verification",
    "convert_layers", "digest", "from_textbook", "load", "origin", "replace_attention", "replaced_attention",
    "restore_attention", "save", "sdpa", "to_grouped", "to_latent", "use_sdpa", "verify",
]  # fmt: skip
