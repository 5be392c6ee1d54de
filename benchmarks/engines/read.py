"""A plain read of k and v: the least time of a call whose keys come from memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from cases import Case, Inputs
from torch import Tensor

from regard._backends.native import core

from .engine import Engine, Place, Prepared


class PlainRead(Engine):
    name = "read"
    title = "plain read"
    attends = False
    note = "not attention: k and v are read once, by as many threads and on the same pages."

    def __init__(self, threads: int, place: Place) -> None:
        super().__init__(threads, place)
        self.pool = ThreadPoolExecutor(threads)

    def version(self) -> str:
        return ""

    @classmethod
    def reason(cls, case: Case) -> str:
        return "" if case.Lq == 1 and case.Lk >= 1024 else "only decode steps"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        return Prepared(lambda: self.read(inputs.k, inputs.v))

    def read(self, *tensors: Tensor) -> None:
        """Reads contiguous tensors once, each thread an equal part of each."""
        parts = [x.view(-1).view(torch.float32).chunk(self.threads) for x in tensors]
        list(self.pool.map(lambda mine: [core.read_probe(x) for x in mine], zip(*parts, strict=True)))
