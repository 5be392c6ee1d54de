"""Fixtures that tests share."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from support import poisoned, runnable_isas

os.environ["MPLBACKEND"] = "Agg"

# `make test` is deterministic; `make test-all` (--hypothesis-profile=full) draws new examples.
# No limit counts clock time, because the machine may be busy.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", untimed, max_examples=25, derandomize=True, database=None)
settings.register_profile("full", untimed, max_examples=300)
settings.load_profile("quick")


@pytest.fixture(params=runnable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on every instruction set that this CPU supports."""
    from regard._backends.native import core

    with core.use_isa(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seeds all generators before each test and restores PyTorch's settings after it."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture
def one_thread() -> None:
    """Sets one thread, for small tensors: thread synchronisation would cost more than the work."""
    torch.set_num_threads(1)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills fresh memory with NaN, so that tests notice elements that are not written."""
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
