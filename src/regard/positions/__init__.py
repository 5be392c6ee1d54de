"""Position encodings: added embeddings, rotary embeddings, and score biases.

The argument `positions` is an int, the position of the first token, or an integer tensor with the
position of every token.
"""

from ._biases import AlibiBias as AlibiBias, Relative as Relative, alibi_slopes as alibi_slopes
from ._embeddings import Learned as Learned, Sinusoidal as Sinusoidal, sinusoidal as sinusoidal
from ._frequencies import (
    NTK as NTK,
    Frequencies as Frequencies,
    LinearScaling as LinearScaling,
    Llama3 as Llama3,
    Scaling as Scaling,
    YaRN as YaRN,
    frequencies as frequencies,
)
from ._positions import Positions as Positions
from ._rotary import Rotary as Rotary, rotary_table as rotary_table, rotate as rotate
