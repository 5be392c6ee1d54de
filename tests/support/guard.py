"""Runs calls whose tensors lie next to guard pages: `-m support.guard first count isa...`.

Each seed gives one call of `attention`, one over stored keys, one of linear attention with its
gradient, and one of `evidence`.

A kernel that accesses an element out of bounds ends this process with SIGSEGV. A write into the
slack at the other side of a buffer changes its sentinel bytes. The last printed seed is the faulty
one.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard._api.stored import attend_stored
from regard._backends.native import attention as _native, core, linear as _linear
from regard._call.linear import LinearCall, LinearOptions, check as check_call
from regard._call.make import make
from regard._call.spec import Options
from regard._call.stored import Stored
from support import linear as linear_cases
from support.evidence import every_fact, float_tensors, run, without_dropout
from support.forward import Call, sample
from support.stored import KINDS, store

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.mprotect.argtypes = LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE, READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE = 4096, 3, 0x4022
SENTINEL = 0xA5
MAKERS = {
    torch: ("empty_like", "zeros_like", "zeros"),
    Tensor: ("new_empty", "new_empty_strided", "new_zeros"),
}


def mapped(size: int) -> int:
    """Maps fresh memory, which is not committed until written. Returns the address."""
    address = LIBC.mmap(None, size, READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(address)


def tensor_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


class Region:
    """Memory for one tensor between two guard pages, next to the first or the second."""

    def __init__(self, count: int, dtype: torch.dtype, at_end: bool) -> None:
        size = max(count, 1) * dtype.itemsize
        self.inner = -(-size // PAGE) * PAGE
        self.base = mapped(self.inner + 2 * PAGE)
        for page in (self.base, self.base + PAGE + self.inner):
            if LIBC.mprotect(page, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        first = self.base + PAGE
        slack = self.inner - size
        self.tensor = tensor_at(first + (slack if at_end else 0), max(count, 1), dtype)[:count]
        self.slack = tensor_at(first + (0 if at_end else size), slack, torch.uint8) if slack else None
        if self.slack is not None:
            self.slack.fill_(SENTINEL)

    def close(self) -> None:
        intact = self.slack is None or bool((self.slack == SENTINEL).all())
        LIBC.munmap(self.base, self.inner + 2 * PAGE)
        assert intact, "bytes beside a tensor were changed"


class Guard:
    """Allocates guarded tensors and frees them together."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.regions: list[Region] = []

    def flat(self, count: int, dtype: torch.dtype) -> Tensor:
        self.regions.append(Region(count, dtype, self.pick.random() < 0.5))
        return self.regions[-1].tensor

    def moved(self, x: Tensor) -> Tensor:
        """Copies x into guarded memory with the same strides."""
        if not x.numel() or x.is_meta:
            return x
        extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        copy = self.flat(extent, x.dtype).zero_().as_strided(x.shape, x.stride())
        return copy.copy_(x) if 0 not in x.stride() else self.flat(x.numel(), x.dtype).view(x.shape).copy_(x)

    def inside(self, x: Tensor) -> bool:
        return any(r.base <= x.data_ptr() < r.base + r.inner + 2 * PAGE for r in self.regions)

    @contextmanager
    def results(self) -> Iterator[None]:
        """Allocates all tensors created inside this context in guarded memory."""
        before = [(owner, name, getattr(owner, name)) for owner, names in MAKERS.items() for name in names]
        for owner, name, make_it in before:
            setattr(owner, name, lambda *a, _make=make_it, **k: self.moved(_make(*a, **k)))
        try:
            yield
        finally:
            for owner, name, make_it in before:
                setattr(owner, name, make_it)

    def close(self) -> None:
        for region in self.regions:
            region.close()


def guarded_forward(call: Call, guard: Guard) -> tuple[Tensor, Tensor]:
    """Returns copies of out and LSE, computed with all inputs and outputs in guarded memory."""
    options = {
        n: guard.moved(x) if isinstance(x, Tensor) and n != "mask" else x for n, x in call.options.items()
    }
    problem = make(*(guard.moved(x) for x in call[:3]), Options(**options, return_lse=True))
    problem = problem._replace(tensors=tuple(guard.moved(x) for x in problem.tensors))
    with guard.results():
        out, lse = _native.forward(problem)
    assert lse is not None
    assert guard.inside(out)
    assert guard.inside(lse)
    return out.clone(), lse.clone()


def check(seed: int, isa: str) -> None:
    call, guard = sample(seed, 2e6)._replace(isa=isa), Guard(seed)
    with core.use_isa(isa):
        results = guarded_forward(call, guard)
    guard.close()
    for got, want in zip(results, call.run(), strict=True):
        assert torch.equal(got, want), f"seed {seed} on {isa}: {call}"


def check_stored(seed: int, isa: str) -> None:
    """Checks attention over stored keys in guarded memory. The storage has no spare capacity."""
    pick, guard = random.Random(seed), Guard(seed)
    Hkv, group, Lq, Lk = (
        pick.choice((1, 2)),
        pick.choice((1, 4)),
        pick.choice((1, 3)),
        pick.choice((1, 17, 65)),
    )
    D, Dv = pick.choice((1, 8, 33, 64)), pick.choice((3, 32, 40))
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, Hkv * group, Lq, D), torch.randn(2, Hkv, Lk, D), torch.randn(2, Hkv, Lk, Dv)
    stored = store(k, v, pick.choice(KINDS), pick.choice((0, 16)), spare=0)
    guarded_parts = [x if x is None else guard.moved(x) for x in stored[:5]]
    with core.use_isa(isa):
        want = attend_stored(q, stored, impl="native")
        with guard.results():
            out = attend_stored(guard.moved(q), Stored(*guarded_parts, *stored[5:]), impl="native")
        assert isinstance(out, Tensor)
        assert guard.inside(out)
        same = torch.equal(out.clone(), want)
    del out, guarded_parts
    guard.close()
    assert same, f"seed {seed} on {isa}: {stored.kind} in pages of {stored.page}"


def both_passes(p: LinearCall, dys: list[Tensor | None]) -> list[Tensor]:
    """Returns the results of linear attention, without and with saved states, and its gradients."""
    result, saved = _linear.linear_saving(p)
    dout, dS, dz = dys
    assert dout is not None
    tensors = (*_linear.linear(p), *result, *_linear.linear_backward(p, saved, dout, dS, dz))
    return [x for x in tensors if x is not None]


def check_linear(seed: int, isa: str) -> None:
    case, guard = linear_cases.sample(seed), Guard(seed)
    options = LinearOptions(**{"causal": True, **dict.fromkeys(LinearOptions._fields[2:]), **case.options})
    p = check_call(case.q, case.k, case.v, None, options)
    with core.use_isa(isa):
        dys = [None if x is None else torch.randn_like(x) for x in _linear.linear(p)]
        want = both_passes(p, dys)
        guarded_call = LinearCall(*(guard.moved(x) if isinstance(x, Tensor) else x for x in p))
        with guard.results():
            got = both_passes(guarded_call, [x if x is None else guard.moved(x) for x in dys])
        same = all(torch.equal(a.clone(), b) for a, b in zip(got, want, strict=True))
        assert all(guard.inside(x) for x in got if x.numel())
    del got, guarded_call
    guard.close()
    assert same, f"seed {seed} on {isa}: {case.options}"


def check_evidence(seed: int, isa: str) -> None:
    """Checks every fact with inputs and outputs in guarded memory."""
    call, guard = without_dropout(sample(seed, 1e6)._replace(isa=isa)), Guard(seed)
    options = {
        n: guard.moved(x) if isinstance(x, Tensor) and n != "mask" else x for n, x in call.options.items()
    }
    facts = every_fact(call.q.shape[-2], call.k.shape[-2], seed)
    want = [x for result in run(call, facts, "native") for x in float_tensors(result)]
    guarded_call = Call(guard.moved(call.q), guard.moved(call.k), call.v, options, isa)
    with guard.results():
        got = [x.clone() for result in run(guarded_call, facts, "native") for x in float_tensors(result)]
    guard.close()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"seed {seed} on {isa}: {call}"


def main(first: int, count: int, isas: list[str]) -> None:
    torch.set_num_threads(1)
    for seed in range(first, first + count):
        for isa in isas:
            print(seed, isa, flush=True)
            check(seed, isa)
            check_stored(seed, isa)
            check_linear(seed, isa)
            check_evidence(seed, isa)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
