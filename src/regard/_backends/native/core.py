"""The compiled core: start-up, instruction sets and threads. No other file imports it."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

VARIABLE = "REGARD_ISA"
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # types.h: DType

_missing: str | None = None
try:
    from ... import _core as _core
except ImportError as error:
    _core = None  # type: ignore[assignment]
    _missing = f"the compiled core could not be loaded ({error})"


def _start() -> bool:
    """Choose the instruction set that the environment asks for and find PyTorch's threads."""
    forced = os.environ.get(VARIABLE)
    if forced and not _core.use(forced):
        raise ValueError(
            f"environment variable {VARIABLE}: expected one of {', '.join(_core.runnable())}, got {forced!r}"
        )
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return _core.open_pool(str(library))


_pool = _start() if _core is not None else False


def reason_unavailable() -> str | None:
    """Why no problem can run here, or None."""
    return _missing


def address(x: Tensor | None) -> int:
    return x.data_ptr() if x is not None else 0


def fma_probe(rounds: int) -> float:
    """Multiply-adds in registers alone, on this thread; how many FLOPs that was."""
    return _core.fma_probe(rounds)


def read_probe(x: Tensor) -> None:
    """Read contiguous float32 numbers once, on this thread."""
    _core.read_probe(x.data_ptr(), x.numel())


def isas() -> list[str]:
    """The instruction sets that this CPU can run."""
    return _core.runnable() if _core is not None else []


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Run with another instruction set for a while."""
    if name not in isas():
        raise ValueError(f"name: expected one of {', '.join(isas())}, got {name!r}")
    before = _core.isa()
    _core.use(name)
    try:
        yield
    finally:
        _core.use(before)


def info() -> dict[str, Any]:
    if _core is None:
        return {"isa": None, "missing": _missing}
    return {
        "isa": _core.isa(),
        "compiled": _core.compiled(),
        "runnable": _core.runnable(),
        "forced": os.environ.get(VARIABLE),
        "threads": _core.threads(),
        "threads_from": "PyTorch's pool"
        if _pool
        else "the calling thread alone (PyTorch's pool was not found)",
        "compiler": _core.compiler(),
    }
