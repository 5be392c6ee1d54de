"""Runs code in another interpreter, for tests of crashes, forks and signals."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from torch import Tensor

from support import ROOT
from support.guard import mapped, tensor_at

HERE = ROOT / "tests"  # where `support` is importable


def python(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter. -X faulthandler tells where it crashed."""
    return subprocess.run(
        [sys.executable, "-u", "-X", "faulthandler", *arguments],
        capture_output=True, text=True, timeout=timeout, cwd=HERE, env=os.environ | environment,
    )  # fmt: skip


# In a background job the shell has SIGINT ignored, and Python leaves it so.
ANSWER_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def script(code: str, timeout: float = 60, **environment: str) -> str:
    """What a script prints; it must end well."""
    done = python("-c", ANSWER_SIGINT + textwrap.dedent(code), timeout=timeout, **environment)
    assert done.returncode == 0, f"code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def far(x: Tensor, dim: int, step: int = 2**31 + 5) -> Tensor:
    """The same numbers with a stride of more than 2^31 elements, in memory that is mapped but not used."""
    stride = list(x.contiguous().stride())
    stride[dim] = step
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
    flat = tensor_at(mapped(extent * x.element_size()), extent, x.dtype)
    return flat.as_strided(x.shape, stride).copy_(x)


# Bytes are compared by Python: PyTorch's own threads hang in a forked child.
FORK = """
    import os, signal, threading
    import torch, regard
    from regard import masks as M

    torch.set_num_threads(2)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 300, 32) for _ in range(3))

    def result():
        return regard.attention(q, k, v, mask=M.Causal(), impl="native").numpy().tobytes()

    want = result()

    def child_agrees():
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os._exit(0 if result() == want and result() == want else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
