"""Regard, as `make bench` calls it."""

from __future__ import annotations

from dataclasses import replace

import peers
from cases import Case, Inputs

import regard

from .engine import Engine, Prepared


class Regard(Engine):
    name = "regard"
    title = "Regard"
    gradients = True
    note = "`regard.attention` with a mask object."

    def version(self) -> str:
        return regard.__version__

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        return Prepared(peers.prepare("regard", replace(case, calls=1), inputs))
