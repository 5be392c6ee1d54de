"""Loads the compiled core and selects its instruction set. No other file imports the core."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

VARIABLE = "REGARD_ISA"
PAIRS = "pairs of bfloat16"
PAIRS_ISA = "avx512bf16"  # the instruction set that multiplies them
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # types.h: DType

_missing: str | None = None
try:
    from ... import _core as _core
except ImportError as error:
    _core = None  # type: ignore[assignment]
    _missing = f"the compiled core could not be loaded ({error})"


def _start() -> bool:
    """Selects the instruction set named by REGARD_ISA, and looks for PyTorch's thread pool.

    Returns whether the thread pool was found.
    """
    forced = os.environ.get(VARIABLE)
    if forced and not _core.use(forced):
        raise ValueError(
            f"environment variable {VARIABLE}: expected one of {', '.join(_core.runnable())}, got {forced!r}"
        )
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return _core.open_pool(str(library))


_pool = _start() if _core is not None else False


def reason_unavailable() -> str | None:
    """Returns why the core is not available, or None if it is."""
    return _missing


def address(x: Tensor | None) -> int:
    """Returns the data pointer of a tensor, 0 for None."""
    return x.data_ptr() if x is not None else 0


def fma_probe(rounds: int, dtype: torch.dtype = torch.float32) -> float:
    """Runs the products of a dtype in registers, on the calling thread. Returns their FLOPs."""
    return _core.fma_probe(rounds, dtype == torch.bfloat16)


def read_probe(*tensors: Tensor, threads: int = 1) -> None:
    """Reads contiguous tensors once, with up to `threads` of PyTorch's threads.

    The probe measures bandwidth: its time is the least that a call that reads the same tensors
    can take.
    """
    _core.read_probe([(x.data_ptr(), x.nbytes) for x in tensors], threads)


def panel_rows() -> int:
    """Returns the number of query rows in a panel: 16 with AVX2, 32 with AVX-512. In float64, half."""
    return int(_core.panel_rows())


def products(dtype: torch.dtype) -> str:
    """Returns how the kernels multiply numbers of a dtype."""
    if dtype == torch.bfloat16 and _core.multiplies_pairs():
        return PAIRS
    return "float64" if dtype == torch.float64 else "float32"


def objections() -> dict[str, str]:
    """Returns, for each instruction set that is not in use, why it is not used by default.

    The reason is "" if only an environment variable or `use_isa` is against it.
    """
    return {name: _core.objection(name) for name in _core.compiled() if name != _core.isa()}


def why_no_pairs() -> str:
    """Returns why bfloat16 numbers are not multiplied in pairs."""
    if PAIRS_ISA not in _core.compiled():
        return f"{PAIRS_ISA} is not compiled"
    return _core.objection(PAIRS_ISA) or f"instruction set {_core.isa()} is in use"


def isas() -> list[str]:
    """Returns the names of the instruction sets that this CPU can run."""
    return _core.runnable() if _core is not None else []


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Makes the core use instruction set `name` in a `with` block."""
    if name not in isas():
        raise ValueError(f"name: expected one of {', '.join(isas())}, got {name!r}")
    previous = _core.isa()
    _core.use(name)
    try:
        yield
    finally:
        _core.use(previous)


def info() -> dict[str, Any]:
    """Returns instruction sets, threads and compiler of the core, or why the core is missing."""
    if _core is None:
        return {"isa": None, "missing": _missing}
    return {
        "isa": _core.isa(),
        "compiled": _core.compiled(),
        "runnable": _core.runnable(),
        "bfloat16 products": products(torch.bfloat16),
        "not": {name: why for name, why in objections().items() if why},
        "forced": os.environ.get(VARIABLE),
        "threads": _core.threads(),
        "threads_from": "PyTorch's pool"
        if _pool
        else "the calling thread alone (PyTorch's pool was not found)",
        "compiler": _core.compiler(),
    }
