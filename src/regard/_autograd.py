"""Run a problem on the backend that was chosen.

The torch and reference backends are built from differentiable operations. The native kernels are not:
dispatch refuses them where gradients are needed, so that nothing is ever detached in silence.
"""

from __future__ import annotations

from torch import Tensor

from ._dispatch import BACKENDS
from ._problem import Problem


def run(problem: Problem, name: str) -> tuple[Tensor, Tensor | None]:
    """out (..., Hq, Lq, Dv), and the LSE (..., Hq, Lq) or None."""
    return BACKENDS[name].forward(problem)
