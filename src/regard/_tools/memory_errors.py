"""MemoryError for tensors that do not fit in the CPU's memory. PyTorch raises RuntimeError for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def raise_if_out_of_memory(error: RuntimeError) -> None:
    """Raises MemoryError if `error` says that PyTorch could not allocate CPU memory."""
    if "DefaultCPUAllocator" in str(error):
        raise MemoryError(str(error)) from error


def memory_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function raise MemoryError if PyTorch cannot allocate CPU memory (a decorator)."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise_if_out_of_memory(error)
            raise

    return wrapper
