"""Facts about the weights by the compiled core: room for the results, and their addresses as integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import facts as F
from ..._call.spec import Problem
from .attention import operands_of, prepare
from .core import _core


class Room(NamedTuple):
    """What facts of one kind add to a call."""

    fields: dict[str, Any]  # numbers, or tensors for their addresses
    parts: Callable[[Any], F.Parts]  # of one of the facts, when the core has written


def evidence(problem: Problem, want: Sequence[F.Fact]) -> list[F.Parts]:
    """The parts of each fact."""
    found: dict[F.Fact, F.Parts] = {}
    for together in _calls(want):
        rooms = [(kind, maker(problem, kind)) for maker, kind in together.items()]
        fields = {name: x for _, room in rooms for name, x in room.fields.items()}
        _look(problem, _core.Facts(**{name: _number(x) for name, x in fields.items()}))
        for kind, room in rooms:
            found |= {fact: room.parts(fact) for fact in kind}
    return [found[fact] for fact in want]


def _look(problem: Problem, facts: _core.Facts) -> None:
    spec, q, k = problem[:3]
    call, *_ = spec.memo.get("native") or prepare(spec, q)
    operands, alive = operands_of(problem)
    call.evidence(q.data_ptr(), k.data_ptr(), spec.offset or 0, operands, facts)
    del alive


def _number(x: int | Tensor | None) -> int:
    return x.data_ptr() if isinstance(x, Tensor) else x or 0


def _calls(want: Sequence[F.Fact]) -> list[dict[Maker, list[Any]]]:
    """Facts by kind, as few times as possible: a call has room for one column mass and one size of blocks."""
    calls: list[dict[Maker, list[Any]]] = []
    for fact in dict.fromkeys(want):
        maker = MAKERS[type(fact)]
        call = next((c for c in calls if not any(_clash(fact, other) for other in c.get(maker, ()))), None)
        if call is None:
            calls.append(call := {})
        call.setdefault(maker, []).append(fact)
    return calls


def _clash(a: F.Fact, b: F.Fact) -> bool:
    if isinstance(a, F.BlockMass) and isinstance(b, F.BlockMass):
        return a.block != b.block
    return isinstance(a, F.ColumnMass)


def _top(problem: Problem, facts: list[F.TopK | F.RowMax]) -> Room:
    widest = max(facts, key=lambda fact: fact.k)
    weights, keys = widest.empty(problem)
    fields = {"k": widest.k, "top_weights": weights, "top_keys": keys}
    return Room(fields, lambda fact: (weights[..., : fact.k], keys[..., : fact.k]))


def _entropy(problem: Problem, facts: list[F.Entropy]) -> Room:
    nats, choices = facts[0].empty(problem)
    return Room({"nats": nats, "choices": choices}, lambda fact: (nats, choices))


def _columns(problem: Problem, facts: list[F.ColumnMass]) -> Room:
    spec, (fact,) = problem.spec, facts
    (mass,), weights = fact.empty(problem), fact.by_sample(spec)
    stride = spec.Lq if weights is not None and len(weights) > 1 else 0
    fields = {"column_mass": mass, "row_weights": weights, "row_weights_batch": stride}
    return Room(fields, lambda fact: (mass,))


def _distances(problem: Problem, facts: list[F.DistanceHistogram]) -> Room:
    mass, distances = facts[0].empty(problem)
    low = int(distances[0]) if len(distances) else 0
    fields = {"histogram": mass, "distance_low": low, "distances": len(distances)}
    return Room(fields, lambda fact: (mass, distances))


def _sets(problem: Problem, facts: list[F.MassOn]) -> Room:
    spec = problem.spec
    chosen = torch.stack([fact.by_sample(spec).expand(spec.B, spec.Lk) for fact in facts])
    mass = torch.stack([part for fact in facts for part in fact.empty(problem)])
    fields = {"sets": len(facts), "chosen": chosen, "mass_on": mass}
    return Room(fields, lambda fact: (mass[facts.index(fact)],))


def _blocks(problem: Problem, facts: list[F.BlockMass]) -> Room:
    parts = {type(fact): fact.empty(problem) for fact in facts}
    names = {F.BlockMass: "block_mass", F.BlockMax: "block_max"}
    fields = {"block": facts[0].block} | {names[kind]: part for kind, (part,) in parts.items()}
    return Room(fields, lambda fact: parts[type(fact)])


def _rows(problem: Problem, facts: list[F.Rows]) -> Room:
    Lq = problem.spec.Lq
    places = sorted({i for fact in facts for i in fact.places(Lq)})
    (values,) = F.Rows(places).empty(problem)
    fields = {"n_rows": len(places), "rows": torch.tensor(places, dtype=torch.int64), "row_values": values}
    return Room(fields, lambda fact: (values[:, :, [places.index(i) for i in fact.places(Lq)]],))


Maker = Callable[[Problem, list[Any]], Room]
MAKERS: dict[type[F.Fact], Maker] = {
    F.Rows: _rows, F.TopK: _top, F.RowMax: _top, F.Entropy: _entropy, F.ColumnMass: _columns,
    F.DistanceHistogram: _distances, F.MassOn: _sets, F.BlockMass: _blocks, F.BlockMax: _blocks,
}  # fmt: skip
