"""Kinds of attention beside each other: small language models that differ in their attention alone."""

from ._measure import (
    FULL as FULL,
    QUICK as QUICK,
    Effort as Effort,
    Measured as Measured,
    Row as Row,
    measure as measure,
)
from ._models import (
    KINDS as KINDS,
    ByteModel as ByteModel,
    Sizes as Sizes,
    layer as layer,
    parameters as parameters,
)
from ._notes import NOTES as NOTES, denied as denied
from ._speed import Side as Side, decoded as decoded
from ._training import trained as trained
