"""Run a problem on the backend that was chosen.

The torch and reference backends are built from differentiable operations. The native kernels are not: a call
that needs gradients is refused there, never detached in silence.
"""

from __future__ import annotations

from torch import Tensor

from ._dispatch import BACKENDS
from ._problem import Problem


def run(problem: Problem, name: str) -> tuple[Tensor, Tensor | None]:
    """out (..., Hq, Lq, Dv), and the LSE (..., Hq, Lq) or None."""
    if problem.needs_grad and name == "native":
        raise NotImplementedError(
            "an input requires grad, and the native backward is not in this version: "
            "use torch.no_grad(), or impl='torch' or impl='reference' to train"
        )
    return BACKENDS[name].forward(problem)
