"""Repeats calls of attention: a call with the signature of a checked call runs in the core at once.

The core reads the tensors through PyTorch's DLPack exchange interface, finds the call by its
signature, allocates the results and computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._call.spec import Problem, Spec
from .attention import prepare
from .core import _core

Repeated = Tensor | tuple[Tensor, Tensor] | Spec | None

_exchange: Any = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # an integer before torch 2.11
_repeats = None
if _core is not None and type(_exchange).__name__ == "PyCapsule":
    _repeats = _core.Repeats(_exchange, torch.empty_like, torch.empty_strided, torch.is_grad_enabled)


def _unknown(*arguments: Any) -> None:
    return None


# repeat(q, k, v, mask program, offset, ... impl), in the order of `attention`. Returns the result, the
# Spec if the call needs gradients, or None if no such call was remembered. PyTorch must not watch the call.
repeat: Any = _unknown if _repeats is None else _repeats.run


def remember(arguments: tuple[Any, ...], problem: Problem, out: Tensor, lse: Tensor | None) -> None:
    """Remembers a call with its results, if no tensor besides q, k and v takes part."""
    spec = problem.spec
    if _repeats is not None and not (spec.has_operands or spec.copied or problem.watched):
        _repeats.remember(arguments, prepare(spec, problem.q)[0], spec, out, lse)


def forget() -> None:
    """Forgets all calls."""
    if _repeats is not None:
        _repeats.clear()
