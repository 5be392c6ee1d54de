"""Where a token stands: added embeddings, rotations of queries and keys, biases of scores.

Positions are an int, the place of the first token, or an integer tensor with the place of every token.
"""

from ._biases import AlibiBias as AlibiBias
from ._biases import Relative as Relative
from ._biases import alibi_slopes as alibi_slopes
from ._embeddings import Learned as Learned
from ._embeddings import Sinusoidal as Sinusoidal
from ._embeddings import sinusoidal as sinusoidal
from ._frequencies import NTK as NTK
from ._frequencies import Frequencies as Frequencies
from ._frequencies import LinearScaling as LinearScaling
from ._frequencies import Llama3 as Llama3
from ._frequencies import Scaling as Scaling
from ._frequencies import YaRN as YaRN
from ._frequencies import frequencies as frequencies
from ._places import Positions as Positions
from ._rotary import Rotary as Rotary
from ._rotary import rotary_table as rotary_table
from ._rotary import rotate as rotate
