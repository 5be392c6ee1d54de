"""Fixtures and comparisons that tests share. The helpers: `from conftest import assert_close, rel_l2`."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

os.environ["MPLBACKEND"] = "Agg"

# `make test` repeats exactly; `make test-all` (--hypothesis-profile=full) looks for new examples.
settings.register_profile("quick", deadline=None, max_examples=25, derandomize=True, database=None)
settings.register_profile("full", deadline=None, max_examples=300)
settings.load_profile("quick")


def have_core() -> bool:
    try:
        return importlib.util.find_spec("regard._core") is not None
    except ModuleNotFoundError:  # regard itself is not installed
        return False


HAVE_CORE = have_core()


def runnable_isas() -> list[Any]:
    if not HAVE_CORE:
        return [pytest.param("none", marks=pytest.mark.skip(reason="regard._core is not built"))]
    from regard import _native

    return list(_native.isas())


def repeats(quick: int, asked: int) -> pytest.MarkDecorator:
    """The argument `times`: `quick` in `make test`, and also `asked` in `make test-all`."""
    return pytest.mark.parametrize("times", [quick, pytest.param(asked, marks=pytest.mark.full)])


@pytest.fixture(params=runnable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once on every instruction set that this CPU can run."""
    from regard import _native

    with _native.use_isa(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers for each test, and PyTorch's settings as they were before it."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture
def one_thread() -> None:
    """For small work: threads that wait for each other cost more than it, above all on a busy machine."""
    torch.set_num_threads(1)


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, but what it leaves unwritten is NaN (integers: the largest value), so that reading it shows."""

    @wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        if x.device.type == "meta" or type(x) not in (Tensor, torch.nn.Parameter):
            return x
        with torch.no_grad():
            if x.is_floating_point() or x.is_complex():
                return x.fill_(float("nan"))
            return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)

    return wrapper


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: an output that is not fully written fails the comparison."""
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


def rel_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; the absolute error when `expected` is zero."""
    a, e = actual.detach().double(), expected.detach().double()
    error, norm = torch.linalg.vector_norm(a - e).item(), torch.linalg.vector_norm(e).item()
    return error / norm if norm > 0 else error


def assert_close(actual: Tensor, expected: Tensor, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal shapes, nothing NaN on either side, the same infinities, and the rest within the tolerance.

    Dtypes may differ: a result is usually compared with a float64 reference.
    """
    assert actual.shape == expected.shape, f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    for name, x in (("actual", actual), ("expected", expected)):
        assert not x.isnan().any(), f"{name} has {int(x.isnan().sum())} NaN of {x.numel()}"
    torch.testing.assert_close(
        actual.detach(), expected.detach(), rtol=rtol, atol=atol, check_dtype=False, equal_nan=False
    )
