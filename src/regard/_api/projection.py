"""Linear layers: native with few rows and without gradients, otherwise PyTorch's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .._backends.native.projection import can_project, project
from .._call.make import needs_grad
from .._tools.arguments import describe
from .._tools.watching import in_autocast, is_watched


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes what `F.linear` computes: x (..., depth), weight (width, depth) -> (..., width).

    The core computes calls with few rows on a CPU if no gradient is recorded and PyTorch neither
    compiles nor transforms the call.
    """
    third = weight if bias is None else bias
    if is_watched(x, weight, third, by_profiler=False):
        return F.linear(x, weight, bias)
    if needs_grad(x, weight, third) or in_autocast() or not can_project(x, weight, bias):
        return _by_torch(x, weight, bias)
    return project(x, weight, bias)


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Calls `F.linear`. Its error for an x of the wrong width does not name x."""
    try:
        return F.linear(x, weight, bias)
    except RuntimeError as error:
        if weight.ndim == 2 and x.ndim and x.shape[-1] != weight.shape[1]:
            raise RuntimeError(f"input: expected (..., {weight.shape[1]}), got {describe(x)}") from error
        raise


class Linear(nn.Linear):
    """A `torch.nn.Linear` that reads its weight at the speed of memory if x has few rows.

    Arguments, parameters, gradients and `state_dict` are PyTorch's. With few rows on a CPU and
    without a gradient, Regard's kernel computes the output. `docs/modules.md` has the exact rule.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Returns input W^T + bias: (..., in_features) -> (..., out_features)."""
        return linear(input, self.weight, self.bias)
