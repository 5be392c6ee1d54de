"""Fixtures that tests share."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from support import poisoned, runnable_isas

os.environ["MPLBACKEND"] = "Agg"

# `make test` repeats exactly; `make test-all` (--hypothesis-profile=full) looks for new examples.
settings.register_profile("quick", deadline=None, max_examples=25, derandomize=True, database=None)
settings.register_profile("full", deadline=None, max_examples=300)
settings.load_profile("quick")


@pytest.fixture(params=runnable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once on every instruction set that this CPU can run."""
    from regard._backends.native import core

    with core.use_isa(request.param):
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


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: an output that is not fully written fails the comparison."""
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
