"""Checks results against float64, so that only correct results are timed.

Uses only public names of `regard`, because `side.py` also runs these checks with other commits.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from cases import Case, Inputs
from torch import Tensor

import regard

# Limit of the largest error norm of a row, divided by the mean norm of a row. Rounding errors are
# well below the limit, the errors of bugs well above.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
ROWS = 6  # query rows in each of the three compared slices


class WrongResult(Exception):
    """A result differs from the expected one, so its time must not be shown."""


def verify(case: Case, inputs: Inputs, result: Any, who: str, slack: float = 1.0) -> None:
    """Checks the result of a timed call: the output, or the gradients if backward is timed.

    The limit of errors is multiplied by `slack`.
    """
    (check if case.work == "forward" else check_gradients)(case, inputs, result, who, slack)


def check(case: Case, inputs: Inputs, out: Tensor, who: str, slack: float = 1.0) -> float:
    """Compares sampled rows of `out` with a float64 result and returns the largest error.

    Raises WrongResult if the error is too large or if any row is not finite.
    """
    errors = [row_error(out[..., rows, :], expected) for rows, expected in exact_rows(case)]
    error = float(torch.tensor(errors).max())  # propagates NaN, unlike Python's max
    if not error < slack * TOLERANCE[case.dtype]:
        raise WrongResult(f"{who}, {case.name}: error {error:.1e} against float64")
    if not out.isfinite().all():
        raise WrongResult(f"{who}, {case.name}: {int((~out.isfinite()).sum())} non-finite values")
    return error


def check_gradients(
    case: Case, inputs: Inputs, grads: tuple[Tensor, ...], who: str, slack: float = 1.0
) -> None:
    """Compares gradients with those of Regard's float64 kernels. Raises WrongResult if they differ.

    The tests of Regard compare these kernels with the reference.
    """
    for name, grad, exact in zip(("dq", "dk", "dv", "dbias"), grads, exact_gradients(case), strict=False):
        error = float((grad.double() - exact).norm() / exact.norm())
        if not error < slack * TOLERANCE[case.dtype]:
            raise WrongResult(f"{who}, {case.name}: error {error:.1e} of {name} against float64")


@functools.lru_cache(maxsize=1)
def exact_gradients(case: Case) -> tuple[Tensor, ...]:
    double = replace(case, dtype=torch.float64, work="training")
    q, k, v, options = case.inputs()
    inputs = Inputs(*(x.detach().double().requires_grad_() for x in (q, k, v)), dict(options))
    if isinstance(options.get("bias"), Tensor):
        inputs.options["bias"] = options["bias"].detach().double().requires_grad_()
    dout = outgoing(case).double()
    with torch.enable_grad():
        out = regard.attention(*inputs[:3], mask=double.make_mask(), **inputs.options)
    return torch.autograd.grad(out, inputs.leaves(), dout)


def outgoing(case: Case) -> Tensor:
    """Returns random numbers (B, Hq, Lq, Dv) that serve as the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(case.B, case.Hq, case.Lq, case.Dv, generator=generator).to(case.dtype)


def sample_rows(case: Case) -> list[slice]:
    """Returns slices of the first, middle and last queries.

    Returns one slice of all queries if there are few, or if the case has dropout, because the
    dropout pattern depends on the row index.
    """
    if case.Lq <= 3 * ROWS or "dropout" in case.inputs().options:
        return [slice(0, case.Lq)]
    return [slice(first, first + ROWS) for first in (0, case.Lq // 2, case.Lq - ROWS)]


@functools.lru_cache(maxsize=1)
def exact_rows(case: Case) -> list[tuple[slice, Tensor]]:
    """Returns float64 results of the query rows that are checked, with their slices.

    Cached, because every implementation is compared with them.
    """
    inputs = case.inputs()
    return [(rows, exact(case, inputs, rows)) for rows in sample_rows(case)]


def exact(case: Case, inputs: Inputs, rows: slice) -> Tensor:
    """Computes the call in float64 for the queries `rows` only. Queries keep their positions."""
    q, k, v, options = inputs
    bias = options.get("bias")
    if isinstance(bias, Tensor):
        options = options | {"bias": bias[..., rows, :].double()}
    return regard.attention(
        q[..., rows, :].double(), k.double(), v.double(), mask=case.make_mask(),
        offset=case.Lk - case.Lq + rows.start, impl="reference", **options,
    )  # fmt: skip


def row_error(out: Tensor, exact: Tensor) -> float:
    """Returns the largest norm of a row of `out - exact`, divided by the mean norm of exact rows.

    Returns NaN if `out` has a NaN.
    """
    error = (out.double() - exact).norm(dim=-1)
    return float(error.max() / exact.norm(dim=-1).mean())


def useful_flops(case: Case, inputs: Inputs) -> int:
    """Returns the FLOPs for the query-key pairs that the mask allows.

    There are two matrix products in forward and five in backward.
    """
    q, k, v, options = inputs
    forward = regard.plan(q, k, v, mask=case.make_mask(), **options).flops
    backward = forward * (3 * case.D + 2 * case.Dv) // (case.D + case.Dv)
    return case.calls * {"forward": forward, "backward": backward, "training": forward + backward}[case.work]
