"""Kinds of attention beside each other: small language models that differ in their attention alone."""

from ._measure import FULL as FULL
from ._measure import QUICK as QUICK
from ._measure import Effort as Effort
from ._measure import Measured as Measured
from ._measure import Row as Row
from ._measure import measure as measure
from ._models import KINDS as KINDS
from ._models import ByteModel as ByteModel
from ._models import Sizes as Sizes
from ._models import layer as layer
from ._models import parameters as parameters
from ._notes import NOTES as NOTES
from ._notes import denied as denied
from ._speed import Side as Side
from ._speed import decoded as decoded
from ._training import trained as trained
