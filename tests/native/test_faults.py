"""Robustness of native calls: memory, strides, forks, signals, threads, instruction sets."""

from __future__ import annotations

import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import cache, masks as M
from regard._backends.native import attention as _native, core
from regard._call.make import make
from regard._call.spec import Options
from support import HAVE_CORE, ROOT, assert_close, repeats
from support.forward import Call, computed, multiplies_pairs, rounded_weights, sample
from support.processes import FORK, far, python, script

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


def native(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return regard.attention(q, k, v, impl="native", **options)


# Guard pages


def run_guarded(first: int, count: int, isas: list[str]) -> None:
    process = python("-m", "support.guard", str(first), str(count), *isas)
    assert process.returncode == 0, f"after {process.stdout.splitlines()[-1:]}: {process.stderr[-3000:]}"


def test_no_access_out_of_bounds() -> None:
    run_guarded(0, 150, core.isas())


@pytest.mark.full
@pytest.mark.parametrize("first", range(150, 2150, 200))
def test_no_access_out_of_bounds_in_many_cases(first: int) -> None:
    run_guarded(first, 200, core.isas())


def test_guard_pages_stop_the_process() -> None:
    code = """
        import ctypes, torch
        from support.guard import Region
        x = Region(1024, torch.float32, True).tensor
        print(ctypes.c_float.from_address(x.data_ptr() + 4092).value)
        print(ctypes.c_float.from_address(x.data_ptr() + 4096).value)
    """
    process = python("-c", textwrap.dedent(code))
    assert process.returncode < 0
    assert process.stdout == "0.0\n"


# Addresses beyond 32 bits


@pytest.mark.parametrize("dim", range(4))
def test_strides_beyond_32_bits(isa: str, dim: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(2, 2, 3, 2).to(dtype) for _ in range(3))
        near = native(q, k, v, mask=M.Causal())
        assert torch.equal(
            native(far(q, dim).expand(q.shape), far(k, dim), far(v, dim), mask=M.Causal()), near
        )


@pytest.mark.parametrize("dim", range(4))
def test_bias_and_mask_beyond_32_bits(isa: str, dim: int) -> None:
    q, k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8)
    bias, keep = torch.randn(2, 2, 3, 4), torch.rand(2, 2, 3, 4) < 0.6
    assert torch.equal(native(q, k, v, bias=far(bias, dim)), native(q, k, v, bias=bias))
    problem = make(q, k, v, Options(mask=keep))
    strided = problem._replace(tensors=(far(problem.tensors[0], dim, 2**32 + 5),))
    assert torch.equal(_native.forward(strided)[0], native(q, k, v, mask=keep))


@pytest.mark.full
def test_more_than_2_to_the_31_elements() -> None:
    """All keys are equal and all values 1, so the result is 1.

    From key 2^31 / 64 on, element indices exceed 2^31.
    """
    L = 2**25 + 3
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64).expand(1, 1, L, 64)
    v = torch.ones(1, 1, 1, 1).expand(1, 1, L, 1)
    out, lse = regard.attention(q, k, v, impl="native", return_lse=True)
    assert_close(out, torch.ones_like(out), rtol=1e-3)
    tail = regard.attention(q, k, v, mask=M.Window(99, 0), impl="native")
    assert_close(tail, torch.ones_like(tail))
    score = (q[0, 0, 0] @ k[0, 0, 0]) / 8
    assert_close(lse.flatten(), score[None] + torch.tensor(float(L)).log(), rtol=1e-4)


# Forks


@repeats(20, 100)
def test_fork_after_threads(times: int) -> None:
    script(
        FORK
        + f"""
    assert all(child_agrees() for _ in range({times}))
    assert result() == want
    """
    )


@repeats(20, 100)
def test_fork_during_a_call_of_another_thread(times: int) -> None:
    script(
        FORK
        + f"""
    stop, calls = threading.Event(), []

    def work():
        while not stop.is_set():
            calls.append(result() == want)

    thread = threading.Thread(target=work)
    thread.start()
    agreed = all(child_agrees() for _ in range({times}))
    stop.set()
    thread.join()
    assert agreed and calls and all(calls)
    """
    )


@repeats(12, 100)
def test_data_loader_with_forked_workers(times: int) -> None:
    script(
        FORK
        + f"""
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return {times}

        def __getitem__(self, i):
            return result() == want

    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
    assert all(bool(x.all()) for x in loader)
    assert result() == want
    """
    )


# Signals

INTERRUPT = """
    import time
    import torch, regard
    from support.processes import interrupt_after

    torch.set_num_threads({threads})
    q = torch.randn(1, 8, 60000, 64)
    small = q[:, :, :50]
    want = regard.attention(small, small, small, impl="native")
    for trial in range({times}):
        sent = interrupt_after(0.3)
        try:
            regard.{call}
            print("not interrupted")
        except KeyboardInterrupt:
            print(time.process_time() - sent[0])
        assert torch.equal(regard.attention(small, small, small, impl="native"), want)
"""


@repeats(3, 50)
@pytest.mark.parametrize(
    ("threads", "call"),
    [
        (2, 'attention(q, q, q, impl="native")'),
        (1, 'attention(q, q, q, impl="native", dropout=0.1, softcap=5.0)'),
        (2, "evidence(q, q, None, regard.Entropy(), regard.ColumnMass())"),
    ],
)
def test_ctrl_c(threads: int, call: str, times: int) -> None:
    code = INTERRUPT.format(threads=threads, call=call, times=times)
    delays = [float(line) for line in script(code).splitlines()]
    assert len(delays) == times
    assert max(delays) < 0.5 * threads, delays


EMPTY_MASK = """
    import functools, operator, signal, time
    import torch, regard
    from regard import masks as M

    torch.set_num_threads(2)
    parts = [M.Window(i, i) & M.Dilated(i) for i in range(3, 300, 3)]
    union = functools.reduce(operator.or_, parts)
    q = torch.zeros(1, 1, 200_000, 1)
    signal.signal(signal.SIGPROF, signal.default_int_handler)
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, 0.3)  # CPU time, as `start`
    try:
        regard.{call}
        print("not interrupted")
    except KeyboardInterrupt:
        print(time.process_time() - start)
"""


@pytest.mark.parametrize(
    "call", ["attention(q, q, q, ", "plan(q, q, q, ", "evidence(q, q, None, regard.Entropy(), "]
)
def test_ctrl_c_while_spans_are_found(call: str) -> None:
    """Finding the spans of this mask takes some 15 s. It allows no pair, so kernels have no work."""
    seconds = float(script(EMPTY_MASK.format(call=call + "mask=union & ~union)")))
    assert seconds < 3


def test_python_signal_handlers_run() -> None:
    """A Python signal handler runs during a call, and the call continues."""
    code = """
        import signal, time, torch, regard
        seen = []
        signal.signal(signal.SIGPROF, lambda *_: seen.append(time.process_time()))
        torch.set_num_threads(1)
        q = torch.randn(1, 8, 8000, 64)
        want = regard.attention(q, q, q, impl="native")
        signal.setitimer(signal.ITIMER_PROF, 0.1)
        out = regard.attention(q, q, q, impl="native")
        end = time.process_time()
        assert seen and torch.equal(out, want)
        assert seen[0] < end - 0.05, "the handler ran only after the call"
    """
    script(code)


# Python threads


@repeats(40, 200)
def test_calls_from_many_threads(times: int) -> None:
    """8 Python threads with 2 PyTorch threads each give the bits of serial calls."""
    torch.set_num_threads(2)
    isa = core.info()["isa"]
    calls = [sample(seed, 3e6)._replace(isa=isa) for seed in range(300, 300 + times)]
    want = [run_default_isa(call) for call in calls]
    wrong: list[int] = []

    def work(start: int) -> None:
        order = [(start * 5 + n) % len(calls) for n in range(len(calls))]
        wrong.extend(n for n in order if not torch.equal(run_default_isa(calls[n]), want[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def run_default_isa(call: Call) -> Tensor:
    """Runs a call without setting an instruction set, which is process-wide."""
    return native(call.q, call.k, call.v, **call.options)


def test_the_gil_is_free_during_a_call() -> None:
    torch.set_num_threads(1)
    q = torch.randn(1, 8, 4000, 64)
    finished = threading.Event()
    thread = threading.Thread(target=lambda: (native(q, q, q), finished.set()))
    thread.start()
    counted = 0
    while not finished.is_set():
        counted += 1
        time.sleep(0.001)
    thread.join()
    assert counted > 3


# Agreement of instruction sets


def disagreement(seed: int, work: float) -> str | None:
    """Runs a sampled call on all instruction sets. Returns how their results disagree, or None.

    Differences that another order of additions explains are allowed.
    """
    calls = [sample(seed, work)._replace(isa=isa) for isa in core.isas()]
    in_pairs = [call for call in calls if multiplies_pairs(call)]
    in_floats = [call for call in calls if not multiplies_pairs(call)]
    return group_disagreement(seed, in_floats, False) or group_disagreement(seed, in_pairs, True)


def group_disagreement(seed: int, calls: list[Call], in_pairs: bool) -> str | None:
    """Does this for instruction sets that all multiply pairs of bfloat16, or all do not."""
    if not calls:
        return None
    call, dtype = calls[0], calls[0].q.dtype
    (first, first_lse), *other_results = [call.run() for call in calls]
    limit = 2 * computed(dtype, first_lse) if dtype.itemsize >= 4 else None
    if in_pairs:
        limit = rounded_weights(call, call.expected()[0]) + torch.finfo(dtype).eps
    for out, lse in other_results:
        if not torch.equal(lse == -torch.inf, first_lse == -torch.inf) or out.isnan().any():
            return f"seed {seed}: empty or NaN rows differ: {call}"
        if limit is not None and apart(out, first, call.v) > limit:
            return f"seed {seed}: {apart(out, first, call.v):.3g} apart: {call}"
        if limit is None and not one_step_apart(out, first):
            return f"seed {seed}: more than one step of {dtype} apart: {call}"
    return None


def apart(a: Tensor, b: Tensor, v: Tensor) -> float:
    """Returns |a - b| / |b|.

    If values cancel, |b| is small. The denominator is therefore at least a tenth of the norm that
    means of Lk random values would have.
    """
    error, size = (torch.linalg.vector_norm(x).item() for x in (a.double() - b.double(), b.double()))
    mean = v.double().square().mean().div(v.shape[-2]).sqrt().item()
    return error / max(size, 0.1 * mean * b.numel() ** 0.5)


def one_step_apart(a: Tensor, b: Tensor) -> bool:
    """Returns whether 16-bit results differ by at most one rounding step."""
    a64, b64 = a.double(), b.double()
    tolerance = torch.finfo(a.dtype).eps * a64.abs() + 4e-6 * a64.abs().amax()
    return bool(((a64 - b64).abs() <= tolerance).all())


def test_instruction_sets_agree() -> None:
    assert not [f for seed in range(10_000, 10_100) if (f := disagreement(seed, 3e6))]


@pytest.mark.full
def test_differential_fuzzing() -> None:
    """Draws new seeds for 60 seconds. A failure prints its seed."""
    seed, end = int(time.time()) % 2**31, time.monotonic() + 60
    while time.monotonic() < end:
        message = disagreement(seed, 1e7)
        assert message is None, message
        seed += 1


# Memory


def extra_memory(*names: str) -> dict[str, int]:
    """Returns the peak memory in bytes that a call with each option adds."""
    process = python("-m", "support.peak_memory", *names, MALLOC_MMAP_THRESHOLD_="65536")
    assert process.returncode == 0, process.stderr[-3000:]
    return {name: int(size) for name, size in (line.rsplit(" ", 1) for line in process.stdout.splitlines())}


def check_memory(names: list[str]) -> None:
    sizes = extra_memory("plain", *names)
    limit = 2 * sizes.pop("plain")
    assert not {name: size for name, size in sizes.items() if size > limit}, f"limit {limit}"


OPTIONS = (
    "causal",
    "window",
    "padding",
    "packed",
    "dense",
    "longformer",
    "bias",
    "row_bias",
    "alibi",
    "relative",
)
OPTIONS += ("softcap", "sink", "dropout", "lse", "offsets", "bfloat16", "strided", "grouped")
MASKS, BIASES = set(OPTIONS[:6]), set(OPTIONS[6:10])
PAIRS = [(a, b) for a, b in combinations(OPTIONS, 2) if not ({a, b} <= MASKS or {a, b} <= BIASES)]


def test_memory_of_a_few_options() -> None:
    check_memory(["causal", "window", "bias", "alibi+dropout", "relative+longformer", "strided+bfloat16"])


@pytest.mark.full
def test_memory_of_every_option() -> None:
    check_memory(list(OPTIONS))


@pytest.mark.full
@pytest.mark.parametrize("part", range(6))
def test_memory_of_every_pair_of_options(part: int) -> None:
    check_memory([f"{a}+{b}" for a, b in PAIRS[part::6]])


@pytest.mark.full
def test_memory_of_100_000_tokens() -> None:
    assert extra_memory("long")["long"] < 300 * 2**20


@repeats(5000, 10_000)
def test_memory_does_not_grow(times: int) -> None:
    code = f"""
        import torch, regard
        from support.peak_memory import resident
        from regard import masks as M
        q = torch.randn(1, 2, 64, 16)
        def calls(n):
            for i in range(n):
                regard.attention(q, q, q, mask=M.Causal(), dropout=0.1, seed=i, impl="native")
        calls(2000)
        before = resident()
        calls({times})
        assert resident() - before < 2**20, resident() - before
    """
    script(code)


# Memory


def test_every_failed_allocation_raises_memory_error(tmp_path: Path) -> None:
    """After the MemoryError the same call gives the same bits."""
    library = tmp_path / "failing_malloc.so"
    source = ROOT / "tests/support/failing_malloc.cpp"
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", "-std=c++17", source, "-o", library], check=True)
    process = python("-m", "support.failing_malloc", LD_PRELOAD=str(library))
    assert process.returncode == 0, f"after {process.stdout.splitlines()[-1:]}: {process.stderr[-3000:]}"


def expanded(*sizes: int) -> Tensor:
    """Returns zeros that take no memory."""
    return torch.zeros(()).expand(sizes)


@pytest.mark.parametrize(
    "call",
    [
        lambda: regard.attention(expanded(1, 1, 2**45, 1), expanded(1, 1, 1, 1), expanded(1, 1, 1, 1)),
        lambda: regard.attention(
            expanded(1, 1, 2**45, 1).detach().requires_grad_(), expanded(1, 1, 1, 1), expanded(1, 1, 1, 1)
        ),
        lambda: regard.evidence(
            expanded(1, 1, 2**45, 1), expanded(1, 1, 1, 1), None, regard.Entropy(), impl="native"
        ),
        lambda: regard.linear_attention(*(3 * [expanded(1, 1, 2**45, 1)]), causal=True, impl="native"),
        lambda: cache.KVCache(1, 1, 1, capacity=2**45).append(
            torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
        ),
    ],
    ids=["forward", "training", "evidence", "linear", "cache"],
)
def test_tensors_that_do_not_fit_raise_memory_error(call: Callable[[], Any]) -> None:
    with pytest.raises(MemoryError, match="bytes"):
        call()
