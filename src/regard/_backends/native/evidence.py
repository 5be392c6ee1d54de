"""Evidence by the compiled core: allocates the results and passes their addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import facts as F
from ..._call.spec import Problem
from ..._tools.memory_errors import memory_errors
from .attention import operands_of, prepare
from .core import _core


class Buffers(NamedTuple):
    """The output buffers that facts of one kind need in a native call."""

    fields: dict[str, Any]  # fields of the core's Facts: numbers, or tensors whose addresses are passed
    parts: Callable[[Any], F.Parts]  # returns the parts of a fact; to be called after the native call


@memory_errors
def evidence(problem: Problem, want: Sequence[F.Fact]) -> list[F.Parts]:
    """Computes each fact's parts: the tensors from which `Fact.result` makes the fact's result."""
    results: dict[F.Fact, F.Parts] = {}
    for group in _group_by_call(want):
        allocated = [(facts, allocate(problem, facts)) for allocate, facts in group.items()]
        fields = {name: x for _, buffers in allocated for name, x in buffers.fields.items()}
        _compute(problem, _core.Facts(**{name: _as_int(x) for name, x in fields.items()}))
        for facts, buffers in allocated:
            results |= {fact: buffers.parts(fact) for fact in facts}
    return [results[fact] for fact in want]


def _compute(problem: Problem, facts: _core.Facts) -> None:
    spec, q, k = problem[:3]
    call, *_ = spec.memo.get("native") or prepare(spec, q)
    operands, keepalive = operands_of(problem)
    call.evidence(q.data_ptr(), k.data_ptr(), spec.offset or 0, operands, facts)
    del keepalive


def _as_int(x: int | Tensor | None) -> int:
    """Converts a value to an integer: a tensor to its address, None to 0."""
    return x.data_ptr() if isinstance(x, Tensor) else x or 0


def _group_by_call(want: Sequence[F.Fact]) -> list[dict[Allocate, list[Any]]]:
    """Distributes facts over as few native calls as possible.

    Returns one dict per native call. It maps a function of ALLOCATE, which allocates output
    buffers, to the facts whose results these buffers hold. One call can compute only one
    `ColumnMass`, and block facts of only one block size.
    """
    groups: list[dict[Allocate, list[Any]]] = []
    for fact in dict.fromkeys(want):
        allocate = ALLOCATE[type(fact)]
        fitting = (g for g in groups if not any(_conflict(fact, other) for other in g.get(allocate, ())))
        group = next(fitting, None)
        if group is None:
            groups.append(group := {})
        group.setdefault(allocate, []).append(fact)
    return groups


def _conflict(a: F.Fact, b: F.Fact) -> bool:
    """Returns whether two facts that use the same output buffers need separate native calls."""
    if isinstance(a, F.BlockMass) and isinstance(b, F.BlockMass):
        return a.block != b.block
    return isinstance(a, F.ColumnMass)


def _top(problem: Problem, facts: list[F.TopK | F.RowMax]) -> Buffers:
    widest = max(facts, key=lambda fact: fact.k)
    weights, keys = widest.empty(problem)
    fields = {"k": widest.k, "top_weights": weights, "top_keys": keys}
    return Buffers(fields, lambda fact: (weights[..., : fact.k], keys[..., : fact.k]))


def _entropy(problem: Problem, facts: list[F.Entropy]) -> Buffers:
    nats, choices = facts[0].empty(problem)
    return Buffers({"nats": nats, "choices": choices}, lambda fact: (nats, choices))


def _columns(problem: Problem, facts: list[F.ColumnMass]) -> Buffers:
    spec, (fact,) = problem.spec, facts
    (mass,), weights = fact.empty(problem), fact.by_sample(spec)
    stride = spec.Lq if weights is not None and len(weights) > 1 else 0
    fields = {"column_mass": mass, "row_weights": weights, "row_weights_batch": stride}
    return Buffers(fields, lambda fact: (mass,))


def _distances(problem: Problem, facts: list[F.DistanceHistogram]) -> Buffers:
    mass, distances = facts[0].empty(problem)
    low = int(distances[0]) if len(distances) else 0
    fields = {"histogram": mass, "distance_low": low, "distances": len(distances)}
    return Buffers(fields, lambda fact: (mass, distances))


def _sets(problem: Problem, facts: list[F.MassOn]) -> Buffers:
    spec = problem.spec
    chosen = torch.stack([fact.by_sample(spec).expand(spec.B, spec.Lk) for fact in facts])
    mass = torch.stack([part for fact in facts for part in fact.empty(problem)])
    fields = {"sets": len(facts), "chosen": chosen, "mass_on": mass}
    return Buffers(fields, lambda fact: (mass[facts.index(fact)],))


def _blocks(problem: Problem, facts: list[F.BlockMass]) -> Buffers:
    parts = {type(fact): fact.empty(problem) for fact in facts}
    names = {F.BlockMass: "block_mass", F.BlockMax: "block_max"}
    fields = {"block": facts[0].block} | {names[kind]: part for kind, (part,) in parts.items()}
    return Buffers(fields, lambda fact: parts[type(fact)])


def _rows(problem: Problem, facts: list[F.Rows]) -> Buffers:
    Lq = problem.spec.Lq
    rows = sorted({i for fact in facts for i in fact.places(Lq)})
    (values,) = F.Rows(rows).empty(problem)
    fields = {"n_rows": len(rows), "rows": torch.tensor(rows, dtype=torch.int64), "row_values": values}
    return Buffers(fields, lambda fact: (values[:, :, [rows.index(i) for i in fact.places(Lq)]],))


Allocate = Callable[[Problem, list[Any]], Buffers]
ALLOCATE: dict[type[F.Fact], Allocate] = {
    F.Rows: _rows, F.TopK: _top, F.RowMax: _top, F.Entropy: _entropy, F.ColumnMass: _columns,
    F.DistanceHistogram: _distances, F.MassOn: _sets, F.BlockMass: _blocks, F.BlockMax: _blocks,
}  # fmt: skip
