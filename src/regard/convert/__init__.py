"""Converts attention modules: PyTorch's MHA to Regard's, and MHA to GQA or MLA with a report."""

from ._files import load as load, origin as origin, save as save
from ._grouped import to_grouped as to_grouped
from ._latent import to_latent as to_latent
from ._layers import ModelReport as ModelReport, convert_layers as convert_layers
from ._needle import Needle as Needle
from ._origin import Origin as Origin, digest as digest
from ._replace import (
    replace_attention as replace_attention,
    replaced_attention as replaced_attention,
    restore_attention as restore_attention,
)
from ._report import Errors as Errors, Point as Point, Report as Report, Spectrum as Spectrum, Step as Step
from ._verify import Verification as Verification, verify as verify
