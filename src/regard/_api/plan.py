"""The public function `plan`: predicts backend, FLOPs, memory traffic and peak memory of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from .._backends.dispatch import BACKENDS, choose, reasons
from .._backends.native import attention as _native, core
from .._backends.torch import attention as _torch
from .._call.layout import dense_mask
from .._call.make import make
from .._call.spec import Bias, Options, Problem, Spec, learned
from .._tools.words import hide_unknown, unknown_keyword
from ..masks import Mask

COUNTED = 2**26  # in calls with more pairs all count as visible, unless the backend is native


@dataclass(frozen=True)
class Plan:
    """The predicted work of a call.

    A pair is one query and one key in one head of one sample. It is visible if the mask allows it.
    """

    impl: str
    kernel: str  # native: instruction set, torch: "sdpa" or "flex", reference: "float64"
    products: str  # native: how numbers are multiplied, and why not in pairs; others: ""
    against: Mapping[str, tuple[str, ...]]  # backend -> why it cannot run the call; () if it can
    fraction: float  # visible pairs divided by all pairs
    flops: int  # 2 * visible pairs * (D + Dv)
    flops_executed: int  # 2 * computed pairs * (D + Dv)
    bytes_read: int  # size of all inputs, each read once
    bytes_written: int  # out and LSE
    peak_extra_bytes: int  # out, LSE and scratch
    tasks: int
    cut: str  # the dimension that is divided among tasks: "queries", or "keys" in decode steps

    @property
    def isa(self) -> str | None:
        return self.kernel if self.impl == "native" else None

    def __str__(self) -> str:
        possible = [name for name, why in self.against.items() if not why]
        rows = [
            ("runs on", f"{self.impl} ({self.kernel})"),
            *([("multiplies", self.products)] if self.products else []),
            *([("also possible", ", ".join(possible))] if possible else []),
            *((f"not {name}", ", ".join(why)) for name, why in self.against.items() if why),
            ("visible pairs", f"{self.fraction:.1%} of the rectangle"),
            ("useful work", f"{_unit(self.flops, 1000)}FLOP"),
            ("executed work", f"{_unit(self.flops_executed, 1000)}FLOP"),
            ("traffic", f"{_unit(self.bytes_read, 1024)}B read, {_unit(self.bytes_written, 1024)}B written"),
            ("extra memory", f"{_unit(self.peak_extra_bytes, 1024)}B at most"),
            ("tasks", f"{self.tasks}, cut along the {self.cut}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


@hide_unknown
def plan(
    q: Tensor, k: Tensor, v: Tensor, *,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, impl: str = "auto",
    **unknown: NoReturn,
) -> Plan:  # fmt: skip
    """Predicts backend and work of `attention` with these arguments, without running it.

    For meta tensors, predicts the torch backend and counts all (query, key) pairs as if the mask
    allowed them.

    Example:
        >>> print(regard.plan(q, k, v, mask=masks.sliding(256)))
    """
    if unknown:
        raise unknown_keyword(plan, unknown)
    seed = 0 if seed is None else seed  # leaves PyTorch's generator unchanged
    problem = make(q, k, v, Options(mask, offset, bias, scale, softcap, sink, dropout, seed, return_lse))
    name = choose(problem, impl)
    against = {other: reasons("attention", problem, other) for other in BACKENDS if other != name}
    pairs, touched, scratch, tasks = _work(problem, name)
    spec = problem.spec
    written = _bytes_written(spec)
    return Plan(
        impl=name,
        kernel=_kernel(problem, name),
        products=_native.products(problem) if name == "native" else "",
        against=against,
        fraction=pairs / max(spec.pairs, 1),
        flops=2 * pairs * (spec.D + spec.Dv),
        flops_executed=2 * touched * (spec.D + spec.Dv),
        bytes_read=_bytes_read(problem),
        bytes_written=written,
        peak_extra_bytes=written + scratch,
        tasks=tasks,
        cut="keys" if name == "native" and _native.decodes(problem) else "queries",
    )


def _kernel(problem: Problem, name: str) -> str:
    if name == "native":
        return str(core.info()["isa"])
    return _torch.kernel(problem) if name == "torch" else "float64"


def _work(problem: Problem, name: str) -> tuple[int, int, int, int]:
    """Returns the numbers of allowed pairs, computed pairs, scratch bytes and tasks."""
    full = problem.spec.pairs
    if name == "native":
        cost = _native.cost(problem)
        return cost.pairs, cost.touched, cost.scratch_bytes, cost.tasks
    return _visible_pairs(problem), full, _dense_scratch(problem, name), 1


def _visible_pairs(problem: Problem) -> int:
    """Counts the (query, key) pairs that the mask allows, by building the dense mask.

    If the call has meta tensors or more than 2**26 pairs, returns the number of all pairs.
    """
    spec = problem.spec
    if problem.mask is None or problem.q.is_meta or spec.pairs > COUNTED:
        return spec.pairs
    keep = dense_mask(problem)
    assert keep is not None
    return int(keep.expand(spec.B, spec.Hq, -1, -1).sum())


def _dense_scratch(problem: Problem, name: str) -> int:
    """Estimates the bytes of the n x n tensors that the torch or reference backend allocates."""
    spec, full = problem.spec, problem.spec.pairs
    if name == "reference":
        return 5 * 8 * full
    size = spec.dtype.itemsize
    if _torch.kernel(problem) == "flex":
        return 3 * size * full if spec.device.type == "cpu" else 0
    return full * (size if spec.bias != "none" else 1) if _torch.needs_dense_mask(problem) else 0


def _bytes_read(problem: Problem) -> int:
    p = problem
    tensors = (p.q, p.k, p.v, learned(p.bias), p.sink, p.offset, *p.tensors)
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _bytes_written(spec: Spec) -> int:
    rows = spec.B * spec.Hq * spec.Lq
    return rows * (spec.Dv * spec.dtype.itemsize + spec.lse_dtype.itemsize * spec.return_lse)


def _unit(amount: float, base: int) -> str:
    """Formats an amount with a prefix: 1234567 -> "1.23 M". Base 1024 uses Ki, Mi, ..."""
    names = ("", "K", "M", "G", "T", "P") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    for name in names:
        if amount < base or name == names[-1]:
            break
        amount /= base
    return f"{amount:.3g} {name}"
