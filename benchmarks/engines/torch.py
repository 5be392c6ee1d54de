"""PyTorch's scaled_dot_product_attention, as `make bench` calls it."""

from __future__ import annotations

from dataclasses import replace

import peers
import torch
from cases import Case, Inputs

from .engine import Engine, Prepared


class PyTorch(Engine):
    name = "torch"
    title = "PyTorch"
    gradients = True
    note = "`scaled_dot_product_attention`; masks that are not causal are float tensors."

    def version(self) -> str:
        return str(torch.__version__)

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        return Prepared(peers.prepare("sdpa", replace(case, calls=1), inputs))
