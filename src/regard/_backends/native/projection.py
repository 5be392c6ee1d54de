"""Linear layers with few rows by the compiled core, at the speed of reading the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._tools.memory_errors import raise_if_out_of_memory
from .core import DTYPES, _core, address

# With more rows than these, PyTorch may be faster (benchmarks/projections.py). For bfloat16, PyTorch
# uses instructions that multiply without conversion, if the CPU has them.
MAX_ROWS = {torch.float32: 32, torch.float64: 32, torch.float16: 32, torch.bfloat16: 8}
DEEP, MAX_ROWS_DEEP = 1024, 4  # of bfloat16, if the depth exceeds DEEP


def can_project(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether `project` can compute x W^T + bias faster than PyTorch.

    The tensors must be plain. The call must be valid, with at least one row.
    """
    dtype = x.dtype
    if _core is None or not (x.is_cpu and weight.is_cpu) or weight.dtype is not dtype or dtype not in DTYPES:
        return False
    if weight.layout is not torch.strided or x.layout is not torch.strided or x.is_nested or weight.ndim != 2:
        return False
    width, depth = weight.shape
    if x.ndim == 0 or x.shape[-1] != depth or not 0 < x.numel() <= _max_rows(dtype, depth) * depth:
        return False
    if weight.stride(1) != 1 or weight.is_neg() or x.is_neg() or not width:
        return False
    return bias is None or (
        bias.dtype is dtype
        and bias.is_cpu
        and bias.shape == (width,)
        and bias.stride(0) == 1
        and not bias.is_neg()
    )


def _max_rows(dtype: torch.dtype, depth: int) -> int:
    return MAX_ROWS_DEEP if dtype is torch.bfloat16 and depth > DEEP else MAX_ROWS[dtype]


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x W^T + bias: x (..., depth), weight (width, depth), bias (width,) -> (..., width)."""
    *batch, depth = x.shape
    width = weight.shape[0]
    try:
        rows = x if x.ndim == 2 else x.reshape(-1, depth)
        out = x.new_empty((*batch, width))
    except RuntimeError as error:
        raise_if_out_of_memory(error)
        raise
    _core.project(
        DTYPES[x.dtype], rows.shape[0], depth, width, rows.data_ptr(), rows.stride(0), rows.stride(1),
        weight.data_ptr(), weight.stride(0), address(bias), out.data_ptr(),
    )  # fmt: skip
    return out
