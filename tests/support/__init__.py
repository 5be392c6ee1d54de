"""Shared test helpers: comparisons here, test cases of each feature in the other files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]  # the repository


def have_core() -> bool:
    try:
        return importlib.util.find_spec("regard._core") is not None
    except ModuleNotFoundError:  # regard itself is not installed
        return False


HAVE_CORE = have_core()


def runnable_isas() -> list[Any]:
    if not HAVE_CORE:
        return [pytest.param("none", marks=pytest.mark.skip(reason="regard._core is not built"))]
    from regard._backends.native import core

    return list(core.isas())


def repeats(quick: int, full: int) -> pytest.MarkDecorator:
    """Parametrizes `times`: `quick` repetitions in `make test`, also `full` in `make test-all`."""
    return pytest.mark.parametrize("times", [quick, pytest.param(full, marks=pytest.mark.full)])


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps an allocating function so that unwritten elements are NaN (integers: the maximum)."""

    @wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        x = allocate(*args, **kwargs)
        if x.device.type == "meta" or type(x) not in (Tensor, torch.nn.Parameter):
            return x
        with torch.no_grad():
            if x.is_floating_point() or x.is_complex():
                return x.fill_(float("nan"))
            return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)

    return wrapper


def rel_l2(actual: Tensor, expected: Tensor) -> float:
    """Returns |actual - expected| / |expected| in float64.

    If `expected` is zero, returns |actual|.
    """
    a, e = actual.detach().double(), expected.detach().double()
    error, norm = torch.linalg.vector_norm(a - e).item(), torch.linalg.vector_norm(e).item()
    return error / norm if norm > 0 else error


def assert_close(actual: Tensor, expected: Tensor, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Checks shapes and values: no NaN, equal infinities, finite values within the tolerance.

    Dtypes may differ, because results are usually compared with a float64 reference.
    """
    assert actual.shape == expected.shape, f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    for name, x in (("actual", actual), ("expected", expected)):
        assert not x.isnan().any(), f"{name} has {int(x.isnan().sum())} NaN of {x.numel()}"
    torch.testing.assert_close(
        actual.detach(), expected.detach(), rtol=rtol, atol=atol, check_dtype=False, equal_nan=False
    )
