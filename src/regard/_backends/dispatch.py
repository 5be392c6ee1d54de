"""Chooses the backend that runs a call, and gives the reasons why other backends cannot.

`impl="auto"` takes the first backend that can run the call: native, then torch, then reference. The
native backend runs every call of attention and evidence on a CPU. Without a compiled core `auto`
starts with torch, and on other devices it tries torch only. A backend chosen by name is never
replaced by another. The environment variable REGARD_IMPL, read at import, names the backend that
`auto` then uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from .._call.layout import canonical
from .._call.linear import LinearCall
from .._call.spec import Problem
from .._tools.arguments import describe
from .._tools.watching import is_watched
from . import reference
from .native import attention as native, core, evidence as native_evidence, linear as native_linear
from .torch import attention as torch_attention, evidence as torch_evidence, linear as torch_linear

VARIABLE = "REGARD_IMPL"
FORCED = os.environ.get(VARIABLE) or None


class Backend(NamedTuple):
    run: Callable[..., Any]
    reasons: Callable[[Any], tuple[str, ...]]  # why the backend cannot run a call; () if it can


def _no_reasons(call: object) -> tuple[str, ...]:
    return ()


def _linear_reasons(call: LinearCall) -> tuple[str, ...]:
    if not call.q.is_cpu:
        return (f"native kernels run on the CPU, the tensors are on {call.q.device}",)
    if not call.causal:
        return ("a call with causal=False is two matrix products, which PyTorch computes",)
    if forward_ad._current_level >= 0 or is_watched(call.q, call.k, call.v, by_profiler=False):
        return ("PyTorch compiles or transforms the call and must see every operation",)
    return ()


TABLE = {
    "attention": {
        "native": Backend(native.forward, native.reasons),
        "torch": Backend(torch_attention.forward, torch_attention.reasons),
        "reference": Backend(reference.forward, reference.reasons),
    },
    "linear": {
        "native": Backend(native_linear.linear, _linear_reasons),
        "torch": Backend(torch_linear.linear, _no_reasons),
        "reference": Backend(reference.linear, _no_reasons),
    },
    "evidence": {
        "native": Backend(native_evidence.evidence, native.reasons),
        "torch": Backend(lambda call, want: torch_evidence.evidence(canonical(call), want), _no_reasons),
        "reference": Backend(reference.evidence, _no_reasons),
    },
}
BACKENDS = tuple(TABLE["attention"])


def choose(problem: Problem, impl: str = "auto") -> str:
    """Returns the name of the backend that runs the problem. Caches the choice in the Spec."""
    memo = problem.spec.choices[problem.needs_grad]
    name = memo.get(impl) if type(impl) is str else None
    if name is None:
        name = memo[impl] = select("attention", problem, impl)
    return name


def select(mechanism: str, call: Problem | LinearCall, impl: str) -> str:
    """Returns the name of the backend that runs a call of attention, linear attention or evidence.

    Raises NotImplementedError if no backend that `impl` allows can run the call.
    """
    if impl == "auto":
        names = preference(call.spec.device)
    else:
        check_name(impl, "impl", "auto")
        names = (impl,)
    obstacles = {}
    for name in names:
        obstacles[name] = reasons(mechanism, call, name)
        if not obstacles[name]:
            return name
    details = "; ".join(f"{name}: {', '.join(why)}" for name, why in obstacles.items())
    others = [name for name in BACKENDS if name not in names and not reasons(mechanism, call, name)]
    hint = f"; possible here: impl={' or '.join(map(repr, others))}" if others else ""
    raise NotImplementedError(f"impl={impl!r} cannot run this call: {details}{hint}")


def reasons(mechanism: str, call: Problem | LinearCall, name: str) -> tuple[str, ...]:
    """Returns why backend `name` cannot run the call, or () if it can."""
    missing = core.reason_unavailable() if name == "native" else None
    return (missing,) if missing is not None else TABLE[mechanism][name].reasons(call)


def preference(device: torch.device) -> tuple[str, ...]:
    """Returns the names of the backends that `auto` tries, in order."""
    if FORCED is not None and FORCED != "auto":
        check_name(FORCED, f"environment variable {VARIABLE}")
        return (FORCED,)
    if device.type != "cpu":
        return ("torch",)
    return BACKENDS if core.reason_unavailable() is None else BACKENDS[1:]


def runs_kernels(impl: str, device: torch.device) -> bool:
    """Returns whether the native kernels run every call of attention on a device with `impl`."""
    name = preference(device)[0] if impl == "auto" else impl
    return name == "native" and device.type == "cpu" and core.reason_unavailable() is None


def check_name(name: object, argument: str, *other_names: str) -> None:
    """Checks that `name` is a backend or one of `other_names`.

    Raises an error that names `argument`.
    """
    known = (*other_names, *BACKENDS)
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected one of {', '.join(known)}, got {describe(name)}")
    if name not in known:
        raise ValueError(f"{argument}: expected one of {', '.join(known)}, got {name!r}")
