"""Runs code in another interpreter, for tests of crashes, forks and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

from torch import Tensor

from support import ROOT
from support.guard import mapped, tensor_at

HERE = ROOT / "tests"  # `support` is importable from here


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs another Python interpreter with -X faulthandler, which prints a traceback on a crash."""
    return subprocess.run(
        [sys.executable, "-u", "-X", "faulthandler", *arguments],
        capture_output=True, text=True, cwd=HERE, env=os.environ | environment,
    )  # fmt: skip


# A shell starts background jobs with SIGINT ignored, and Python keeps it ignored.
ANSWER_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def script(code: str, **environment: str) -> str:
    """Runs a script and returns its output. Fails if the exit code is not 0."""
    child = python("-c", ANSWER_SIGINT + textwrap.dedent(code), **environment)
    assert child.returncode == 0, f"code {child.returncode}\n{child.stdout[-2000:]}\n{child.stderr[-4000:]}"
    return child.stdout


# Python ignores SIGXFSZ by default. With the system's default, the kernel kills the process.
KILL_AT_LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""


def killed_while_writing(code: str) -> None:
    """Runs a script that writes a file, and checks that it is killed within the file's first pages.

    A line `LIMIT` in the script marks where the limit begins. Default: at the start.
    """
    before, _, after = textwrap.dedent(code).rpartition("LIMIT\n")
    child = python("-c", before + KILL_AT_LIMIT + after)
    assert child.returncode == -signal.SIGXFSZ, f"code {child.returncode}\n{child.stderr[-4000:]}"


def interrupt_after(seconds: float) -> list[float]:
    """Sends SIGINT to this process from another thread, after `seconds` of CPU time.

    Returns a list, which then has the CPU time of the signal. Clock time would not do: on a busy
    machine it passes before the call to interrupt begins.
    """
    sent: list[float] = []
    end = time.process_time() + seconds

    def send() -> None:
        while time.process_time() < end:
            time.sleep(0.005)
        sent.append(time.process_time())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    return sent


def far(x: Tensor, dim: int, step: int = 2**31 + 5) -> Tensor:
    """Copies x into memory in which dim `dim` has a stride above 2^31.

    Unused pages are not committed.
    """
    stride = list(x.contiguous().stride())
    stride[dim] = step
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
    flat = tensor_at(mapped(extent * x.element_size()), extent, x.dtype)
    return flat.as_strided(x.shape, stride).copy_(x)


# Python compares the bytes, because PyTorch's threads hang in a forked child.
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
            signal.alarm(1200)  # only ends a child that hangs
            os._exit(0 if result() == want and result() == want else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
