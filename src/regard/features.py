"""Random features: maps phi for which phi(q).phi(k) approximates a kernel such as exp(q.k).

Random features make attention linear in the length:
sum_j phi(q).phi(k_j) v_j = phi(q).(sum_j phi(k_j) v_j).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ._tools.arguments import count, describe, number


def orthogonal_gaussian(
    features: int, dim: int, *, generator: torch.Generator | None = None,
    device: torch.device | str | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Returns a random projection (features, dim) whose rows are orthogonal in groups of `dim`.

    Each row is distributed as N(0, I). Random features made with orthogonal rows estimate the
    kernel with a lower variance than with independent rows.
    """
    blocks = -(-count("features", features, 1) // count("dim", dim, 1))
    noise = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64)
    lengths = torch.randn(features, dim, generator=generator, dtype=torch.float64).norm(dim=1)
    q, r = torch.linalg.qr(noise)
    # With the signs of r's diagonal, q is uniformly distributed over the orthogonal group.
    rows: Tensor = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.flatten(0, 1)[:features]
    projection: Tensor = lengths[:, None] * rows
    return projection.to(device=device, dtype=dtype or torch.get_default_dtype())


def positive_exponents(x: Tensor, projection: Tensor, *, scale: float = 1.0) -> Tensor:
    """Returns the logarithms of `positive_features`, (..., D) -> (..., m)."""
    _check(x, projection, scale)
    half = (scale * x.square().sum(-1, keepdim=True) + math.log(projection.shape[0])) / 2
    return _projected(x, projection, scale) - half


def positive_features(x: Tensor, projection: Tensor, *, scale: float = 1.0) -> Tensor:
    """Returns the FAVOR+ features of x, (..., D) -> (..., m).

    The features are positive, and the mean of phi(q).phi(k) over projections is exp(scale * q.k):
    phi(x)_i = exp(w_i.x' - |x'|^2 / 2) / sqrt(m), where w_i is row i of the projection and
    x' = sqrt(scale) x.

    Args:
        x: queries or keys (..., D).
        projection: (m, D), as from `orthogonal_gaussian`.
        scale: multiplies q.k.
    """
    return positive_exponents(x, projection, scale=scale).exp()


def generalized_features(
    x: Tensor, projection: Tensor, kernel: Callable[[Tensor], Tensor] = torch.relu, *, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Returns the features kernel(w_i.x') of x, (..., D) -> (..., m).

    w_i is row i of the projection (m, D), and x' = sqrt(scale) x.
    """
    _check(x, projection, scale)
    if not callable(kernel):
        raise TypeError(f"kernel: expected a function of a tensor, got {describe(kernel)}")
    return kernel(_projected(x, projection, scale))


def _projected(x: Tensor, projection: Tensor, scale: float) -> Tensor:
    projected: Tensor = x @ (scale**0.5 * projection.mT.to(x.dtype))
    return projected


def _check(x: Tensor, projection: Tensor, scale: float) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x: expected a float tensor (..., D), got {describe(x)}")
    if not number("scale", scale) > 0:
        raise ValueError(f"scale: expected a number above 0, got {scale}")
    if projection.dim() != 2 or projection.shape[1] != x.shape[-1]:
        raise ValueError(f"projection: expected (m, D = {x.shape[-1]}), got {describe(projection)}")
