"""The textbook formula of attention, which stores all n x n weights."""

from __future__ import annotations

import math

from torch import Tensor


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k) @ v


def relative(found: Tensor, exact: Tensor) -> float:
    """Returns the norm of the error of `found`, divided by the norm of `exact`."""
    return float((found - exact).norm() / exact.norm())
