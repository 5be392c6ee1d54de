"""Position encodings: added embeddings, rotary embeddings, and score biases.

The argument `positions` is an int, the position of the first token, or an integer tensor with the
position of every token.
"""

from ._biases import AlibiBias, Relative, alibi_slopes
from ._embeddings import Learned, Sinusoidal, sinusoidal
from ._frequencies import NTK, Frequencies, LinearScaling, Llama3, Scaling, YaRN, frequencies
from ._positions import Positions
from ._rotary import Rotary, rotary_table, rotate

__all__ = [
    "NTK", "AlibiBias", "Frequencies", "Learned", "LinearScaling", "Llama3", "Positions", "Relative",
    "Rotary", "Scaling", "Sinusoidal", "YaRN", "alibi_slopes", "frequencies", "rotary_table", "rotate",
    "sinusoidal",
]  # fmt: skip
