"""Which backend runs a problem, and the reasons against the others.

`auto` takes the native kernels on a CPU and PyTorch's elsewhere. Only where there is no compiled core does
`auto` go on to PyTorch and then to the reference. A backend asked for by name never falls back.
The environment variable REGARD_IMPL, read when the library is imported, says what `auto` means.
"""

from __future__ import annotations

import os
from typing import Protocol

from torch import Tensor

from .._call.problem import Problem
from .._tools.arguments import describe
from . import reference
from .native import attention as _native
from .native import core
from .torch import attention as _torch


class Backend(Protocol):
    """A module with these two functions. Reasons depend on the Spec and on `needs_grad` alone."""

    def reasons(self, problem: Problem) -> tuple[str, ...]: ...
    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]: ...


BACKENDS: dict[str, Backend] = {"native": _native, "torch": _torch, "reference": reference}
VARIABLE = "REGARD_IMPL"
FORCED = os.environ.get(VARIABLE) or None


def choose(problem: Problem, impl: str = "auto") -> str:
    """The name of the backend that runs the problem. Remembered in the Spec."""
    memo = problem.spec.choices[problem.needs_grad]
    name = memo.get(impl) if type(impl) is str else None
    if name is None:
        name = memo[impl] = _choose(problem, impl)
    return name


def reasons(problem: Problem, name: str) -> tuple[str, ...]:
    """Why backend `name` cannot run the problem; () when it can."""
    missing = core.reason_unavailable() if name == "native" else None
    if missing is not None:
        return (missing,)
    return BACKENDS[name].reasons(problem)


def preference(problem: Problem) -> tuple[str, ...]:
    """What `auto` tries, in order."""
    if FORCED is not None and FORCED != "auto":
        check_name(FORCED, f"environment variable {VARIABLE}")
        return (FORCED,)
    if problem.spec.device.type != "cpu":
        return ("torch",)
    return ("native",) if core.reason_unavailable() is None else ("torch", "reference")


def _choose(problem: Problem, impl: str) -> str:
    check_name(impl, "impl", "auto")
    names = preference(problem) if impl == "auto" else (impl,)
    against = {name: reasons(problem, name) for name in names}
    for name, found in against.items():
        if not found:
            return name
    told = "; ".join(f"{name}: {', '.join(found)}" for name, found in against.items())
    others = [name for name in BACKENDS if name not in names and not reasons(problem, name)]
    hint = f"; possible here: impl={' or '.join(map(repr, others))}" if others else ""
    raise NotImplementedError(f"impl={impl!r} cannot run this call: {told}{hint}")


def check_name(name: object, argument: str, *more: str) -> None:
    known = (*more, *BACKENDS)
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected one of {', '.join(known)}, got {describe(name)}")
    if name not in known:
        raise ValueError(f"{argument}: expected one of {', '.join(known)}, got {name!r}")
