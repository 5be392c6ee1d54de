"""The base class of the engines that `make bench-peers` compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from cases import Case, Inputs
from install import ensure, with_pip
from torch import Tensor

from regard import masks as M

Place = Callable[[Tensor], Tensor]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = {FP32: "float32", BF16: "bfloat16", FP16: "float16"}


class Prepared(NamedTuple):
    """A call that is ready to be timed."""

    run: Callable[[], Any]
    result: Callable[[Any], Any] = lambda raw: raw  # what `run` returned -> output or gradients as tensors


class Engine:
    """A library that computes attention on a CPU.

    The module of an engine imports the library in `__init__`, so that names, packages and reasons
    are known without it.

    Attributes:
        name: the name in `--engines`.
        title: the title of the column.
        packages: what pip installs into build/peers/`folder`, with the versions of
            requirements/peers.txt and without dependencies.
        dtypes: the dtypes of inputs that the engine's kernels accept.
        gradients: whether the engine has a backward pass.
        slack: the factor by which errors may exceed the limit of `checks`.
        attends: whether the engine computes attention, so that its result is checked.
        note: how the engine is called, for the page.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    folder: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (FP32, BF16, FP16)
    gradients: ClassVar[bool] = False
    slack: ClassVar[float] = 1.0
    attends: ClassVar[bool] = True
    note: ClassVar[str]

    def __init__(self, threads: int, place: Place) -> None:
        """Imports the library.

        Args:
            threads: number of threads of every call.
            place: copies a tensor to aligned memory on the pages of the run. The memory stays until the next
                case, so that it may be passed to the library by address.
        """
        self.threads, self.place = threads, place

    @classmethod
    def install(cls) -> str:
        """Installs the packages, unless they are there. Returns an error message, or ""."""
        return ensure(cls.folder, cls.packages, with_pip) if cls.packages else ""

    def version(self) -> str:
        """Returns the version of the library."""
        raise NotImplementedError

    @classmethod
    def reason(cls, case: Case) -> str:
        """Returns why the engine cannot run the case, or ""."""
        if case.work != "forward" and not cls.gradients:
            return "no backward pass"
        if case.dtype not in cls.dtypes:
            return f"no {KINDS[case.dtype]}"
        return ""

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Makes the inputs in the engine's layout, and returns the call."""
        raise NotImplementedError


def key_lengths(case: Case) -> Tensor:
    """Returns the number of keys of each sample: (B,)."""
    mask = case.make_mask()
    return mask.n if isinstance(mask, M.Lengths) else torch.full((case.B,), case.Lk)


def tokens_first(x: Tensor) -> Tensor:
    """Returns (B, H, L, D) as a contiguous tensor (B, L, H, D)."""
    return x.transpose(1, 2).contiguous()
