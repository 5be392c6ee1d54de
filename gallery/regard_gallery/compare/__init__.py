"""Compares attention mechanisms in small language models that differ only in attention."""

from ._measure import FULL, QUICK, Effort, Measured, Row, measure
from ._models import KINDS, ONE_HEAD, ByteModel, Sizes, layer, parameters
from ._notes import NOTES, denied, undecided
from ._speed import Side, decoded
from ._training import trained

__all__ = [
    "FULL", "KINDS", "NOTES", "ONE_HEAD", "QUICK", "ByteModel", "Effort", "Measured", "Row", "Side", "Sizes",
    "decoded", "denied", "layer", "measure", "parameters", "trained", "undecided",
]  # fmt: skip
