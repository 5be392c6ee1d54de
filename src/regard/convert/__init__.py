"""Other attention with the same weights: swapped, grouped or latent, with a report of what that changes."""

from ._files import load as load
from ._files import origin as origin
from ._files import save as save
from ._grouped import to_grouped as to_grouped
from ._latent import to_latent as to_latent
from ._layers import ModelReport as ModelReport
from ._layers import convert_layers as convert_layers
from ._needle import Needle as Needle
from ._origin import Origin as Origin
from ._origin import digest as digest
from ._replace import replace_attention as replace_attention
from ._replace import replaced_attention as replaced_attention
from ._replace import restore_attention as restore_attention
from ._report import Errors as Errors
from ._report import Point as Point
from ._report import Report as Report
from ._report import Spectrum as Spectrum
from ._report import Step as Step
from ._verify import Verification as Verification
from ._verify import verify as verify
