"""`python -m regard.info`: prints versions, the available backends and the result of a self-test.

The exit code is 0 if the self-test passes, otherwise 1.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from ._autograd.attention import run
from ._backends import dispatch as _dispatch
from ._backends.native import core
from ._call.make import make
from ._call.spec import Options

TOLERANCE = 1e-6  # largest relative L2 error that passes, in float32


def report() -> dict[str, str]:
    """Returns versions, threads and backends as a dict name -> text, one entry per printed line."""
    missing = core.reason_unavailable()
    entries = {
        "regard": _version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads of torch": str(torch.get_num_threads()),
        "auto means": " then ".join(_auto()),
        "native core": "available" if missing is None else f"not available: {missing}",
    }
    return entries | (dict(_lines(core.info(), "native ")) if missing is None else {})


def self_test(name: str) -> float | None:
    """Returns the relative L2 error of a backend in float32 against the float64 reference.

    Returns None if the backend cannot run.
    """
    (q, k, v), options = _inputs(), Options(scale=0.2)
    with torch.no_grad():
        problem = make(q, k, v, options)
        if _dispatch.reasons("attention", problem, name):
            return None
        out, _ = run(problem, name)
        exact, _ = run(make(q.double(), k.double(), v.double(), options), "reference")
    return float((out.double() - exact).norm() / exact.norm())


def main() -> int:
    for name, text in report().items():
        print(f"{name:<20} {text}")
    errors = {name: self_test(name) for name in _dispatch.BACKENDS}
    for name, error in errors.items():
        print(f"{'self-test ' + name:<20} {_verdict(error)}")
    return 0 if all(error is None or error < TOLERANCE for error in errors.values()) else 1


def _verdict(error: float | None) -> str:
    if error is None:
        return "cannot run here"
    return f"error {error:.1e} against float64: {'ok' if error < TOLERANCE else 'WRONG'}"


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q (2, 4, 37, 24), k (2, 2, 53, 24) and v (2, 2, 53, 40), random with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 4, 37, 24), (2, 2, 53, 24), (2, 2, 53, 40)
    q, k, v = (torch.randn(size, generator=generator) for size in sizes)
    return q, k, v


def _auto() -> tuple[str, ...]:
    try:
        return _dispatch.preference(torch.device("cpu"))
    except ValueError as error:
        return (str(error),)


def _version() -> str:
    try:
        return version("regard")
    except PackageNotFoundError:
        return "not installed (run from source)"


def _lines(info: Mapping[str, object], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in info.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name} ")
        else:
            values = value if isinstance(value, list | tuple) else (value,)
            yield f"{prefix}{name}", ", ".join(map(str, values))


if __name__ == "__main__":
    raise SystemExit(main())
