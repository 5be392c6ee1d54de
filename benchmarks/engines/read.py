"""A plain read of k and v: the least time of a call whose keys come from memory."""

from __future__ import annotations

from cases import Case, Inputs

from regard._backends.native import core

from .engine import Engine, Prepared


class PlainRead(Engine):
    name = "read"
    title = "plain read"
    attends = False
    note = "not attention: k and v are read once, by as many threads and on the same pages."

    def version(self) -> str:
        return ""

    @classmethod
    def reason(cls, case: Case) -> str:
        return "" if case.Lq == 1 and case.Lk >= 1024 else "only decode steps"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        return Prepared(lambda: core.read_probe(inputs.k, inputs.v, threads=self.threads))
