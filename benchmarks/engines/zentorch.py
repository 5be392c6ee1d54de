"""zentorch, AMD's plug-in for PyTorch."""

from __future__ import annotations

import importlib

import torch
from cases import Case, Inputs
from peers import sdpa_options

from .engine import Engine, Place, Prepared


class Zentorch(Engine):
    name = folder = "zentorch"
    title = "zentorch"
    packages = ("zentorch", "deprecated", "wrapt")
    note = "the operator `zentorch_sdpa`, with the arguments of SDPA."

    def __init__(self, threads: int, place: Place) -> None:
        super().__init__(threads, place)
        self.library = importlib.import_module("zentorch")

    def version(self) -> str:
        return str(self.library.__version__)

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        q, k, v, _ = inputs
        options = sdpa_options(case, inputs)
        options.pop("enable_gqa")  # the operator groups heads without being told
        return Prepared(lambda: torch.ops.zentorch.zentorch_sdpa(q, k, v, **options)[0])
