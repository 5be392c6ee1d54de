"""Detects whether PyTorch compiles, traces, transforms or profiles a call, or counts its FLOPs.

No other file imports from `torch._C`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active as in_transform,
    _AutoDispatchBelowAutograd as below_autograd,
    _disabled_torch_function_impl as no_torch_function,
    _is_any_autocast_enabled as in_autocast,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

__all__ = [
    "PLAIN", "below_autograd", "in_autocast", "in_transform", "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor", "is_watched", "no_torch_function", "uncompiled",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_watched(q: Tensor, k: Tensor, v: Tensor, by_profiler: bool = True) -> bool:
    """Returns whether the call must go through an operator that PyTorch can see.

    This is the case while PyTorch compiles, traces, transforms, profiles or counts FLOPs, or if q,
    k or v is a tensor subclass. With `by_profiler=False` an active profiler is ignored.
    """
    return (
        (by_profiler and profiler._is_profiler_enabled)
        or is_dynamo_compiling()
        or _len_torch_dispatch_stack() > 0
        or in_transform()
        or _is_tracing()
        or not (type(q) is type(k) is type(v) is Tensor or PLAIN.issuperset(map(type, (q, k, v))))
    )


def uncompiled(function: F, reason: str | None = None) -> F:
    """Does the same as `torch.compiler.disable`, but does not import the compiler.

    Importing the compiler takes as long as importing torch, and few programs need it. With
    `fullgraph=True`, the compiler's error contains the reason.
    """
    skip = _FrameAction.SKIP  # for the frame of the function and for all frames below it
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a graph break instead of inlining
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function
