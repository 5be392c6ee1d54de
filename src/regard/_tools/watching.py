"""Whether PyTorch is watching: compiling, tracing, transforming, counting or profiling.

Everything that needs `torch._C` is imported here and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active as in_transform,
    _AutoDispatchBelowAutograd as below_autograd,
    _disabled_torch_function_impl as no_torch_function,
    _get_tracing_state,
    _is_any_autocast_enabled as in_autocast,
    _len_torch_dispatch_stack,
)
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

__all__ = [
    "PLAIN", "below_autograd", "in_autocast", "in_transform", "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor", "is_watched", "no_torch_function",
]  # fmt: skip

PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_watched(q: Tensor, k: Tensor, v: Tensor, by_profiler: bool = True) -> bool:
    """Whether PyTorch must see the call: it compiles, traces, transforms, counts or profiles.

    Or q, k or v are not plain tensors. Without `by_profiler`, a profiler does not count: it only looks on.
    """
    return (
        (by_profiler and profiler._is_profiler_enabled)
        or is_dynamo_compiling()
        or _len_torch_dispatch_stack() > 0
        or in_transform()
        or _get_tracing_state() is not None
        or type(q) not in PLAIN
        or type(k) not in PLAIN
        or type(v) not in PLAIN
    )
