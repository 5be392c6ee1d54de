"""Random calls with output gradients, their expected input gradients, and error limits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import regard
from regard import masks as M
from regard._backends.native import core
from regard._backends.reference import attention as formula
from regard._call.dropout import keep_mask
from regard._call.layout import dense_bias, heads_4d
from regard._call.make import make
from regard._call.spec import Options, Problem, learned
from regard.scores import Alibi, RelativeBias
from support import peak_memory
from support.forward import INF, UNIT, WIDTHS, Call, Sampler, doubled, largest
from support.guard import Guard

MEMORY_OPTIONS = {name: make_one for name, make_one in peak_memory.OPTIONS.items() if name != "lse"} | {
    "row numbers": lambda: {"bias": torch.randn(1, peak_memory.H, peak_memory.L, 1)},
    "one number": lambda: {"bias": torch.randn(())},
    "narrow bias": lambda: {"bias": torch.randn(peak_memory.L, peak_memory.L).bfloat16()},
    "far": lambda: {"bias": RelativeBias(torch.randn(32, peak_memory.H), max_distance=peak_memory.L)},
    "dilated": lambda: {"mask": M.Dilated(64)},
    "scattered": lambda: {"mask": M.Documents(torch.arange(peak_memory.L) % 2)},
}
INPUTS = ("q", "k", "v", "bias", "sink")  # bias: the tensor, ALiBi's slopes or the relative table

# Limit of the relative L2 error against float64, for N(0, 1) inputs large enough that the error is
# an average.
GATE = {torch.float32: 1.5e-6, torch.bfloat16: 2.2e-3, torch.float16: 2.7e-4, torch.float64: 1e-12}
# Limit of the error before results are rounded to their dtype. Sums are in float32 or float64. A
# bfloat16 output and its residual give 16 bits, which limits gradients that are small differences.
COMPUTED = {torch.float32: 1.5e-6, torch.bfloat16: 1e-5, torch.float16: 1.5e-6, torch.float64: 1e-12}
# The same where bfloat16 is multiplied in pairs: weights and score gradients are rounded before the
# sums, by at most 2**-9 of each term. PyTorch's errors are 2.7e-3 in dq and 3.1e-3 in dk and dv.
PAIRS_GATE, PAIRS_COMPUTED = 2.9e-3, 2.0**-8


class Training(NamedTuple):
    """A call and the gradients of its output and LSE."""

    call: Call
    dout: Tensor
    dlse: Tensor | None = None

    def run(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Returns the native gradients of the named inputs, by default of all inputs."""
        with core.use_isa(self.call.isa):
            return gradients(self, names)

    def expected(self) -> dict[str, Tensor]:
        """Returns the reference gradients of the same inputs in float64."""
        return reference(self.call, self.dout, self.dlse)


def reference(call: Call, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs(call).items()}
    options = {name: doubled(x) for name, x in call.options.items()} | with_leaves(call, leaves)
    q, k, v = (leaves[name] for name in "qkv")
    results = regard.attention(q, k, v, **options, return_lse=True, impl="reference")
    output_grads = (dout.double(), torch.zeros_like(results[1]) if dlse is None else dlse.double())
    input_grads = torch.autograd.grad(results, list(leaves.values()), output_grads, materialize_grads=True)
    return dict(zip(leaves, input_grads, strict=True))


def training(call: Call, lse: bool = False) -> Training:
    """Adds random output gradients to a call. Uses PyTorch's global generator."""
    spec = make(call.q, call.k, call.v, Options(**call.options)).spec
    dout = torch.randn(spec.out_shape).to(spec.dtype)
    return Training(call, dout, torch.randn(spec.lse_shape).to(spec.lse_dtype) if lse else None)


def inputs(call: Call) -> dict[str, Tensor]:
    """Returns the differentiable inputs of a call by name."""
    tensors = (*call[:3], learned(call.options.get("bias")), call.options.get("sink"))
    return {name: x for name, x in zip(INPUTS, tensors, strict=True) if x is not None}


def with_leaves(call: Call, leaves: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the options `bias` and `sink` with their tensors replaced by `leaves`."""
    bias, options = call.options.get("bias"), {name: leaves[name] for name in ("sink",) if name in leaves}
    if isinstance(bias, Alibi):
        return options | {"bias": Alibi(leaves["bias"])}
    if isinstance(bias, RelativeBias):
        table = RelativeBias(leaves["bias"], bidirectional=bias.bidirectional, max_distance=bias.max_distance)
        return options | {"bias": table}
    return options if bias is None else options | {"bias": leaves["bias"]}


def gradients(t: Training, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Computes native gradients by autograd.

    All tests of native gradients go through this function.
    """
    call, chosen = t.call, list(inputs(t.call) if names is None else names)
    leaves = {name: x.detach().requires_grad_(name in chosen) for name, x in inputs(call).items()}
    options = call.options | with_leaves(call, leaves) | {"return_lse": True, "impl": "native"}
    results = regard.attention(leaves["q"], leaves["k"], leaves["v"], **options)
    n = 1 if t.dlse is None else 2
    sources = [leaves[name] for name in chosen]
    if not sources:
        return {}
    return dict(zip(chosen, torch.autograd.grad(results[:n], sources, (t.dout, t.dlse)[:n]), strict=True))


# Expected gradients


def by_pairs(t: Training) -> dict[str, Tensor]:
    """Computes dq, dk and dv as sums over visible pairs, so NaN in masked pairs has no effect.

    The reference's backward has matrix products, in which 0 * NaN is NaN.
    """
    p = make(*(x.double() for x in t.call[:3]), Options(**{n: doubled(x) for n, x in t.call.options.items()}))
    spec = p.spec
    q, k, v = (formula._per_query_head(p, x) for x in (p.q, p.k, p.v))
    visible, w, _ = formula._softmax(p)
    pair, w = visible[..., None], torch.where(visible, w, 0.0)
    dout = t.dout.double()[..., :, None, :]
    dp = (dout * v[..., None, :, :]).sum(-1)
    delta = torch.where(visible, w * dp, 0.0).sum(-1, keepdim=True)
    if t.dlse is not None:
        delta = delta - t.dlse.double()[..., None]
    ds = torch.where(visible, w * (dp - delta) * softcap_slope(p), 0.0)[..., None] * spec.scale
    grouped = (spec.B, spec.Hkv, -1)
    return {
        "q": torch.where(pair, ds * k[..., None, :, :], 0.0).sum(-2),
        "k": torch.where(pair, ds * q[..., :, None, :], 0.0).sum(-3).view(*grouped, spec.Lk, spec.D).sum(2),
        "v": torch.where(pair, w[..., None] * dout, 0.0).sum(-3).view(*grouped, spec.Lk, spec.Dv).sum(2),
    }


def softcap_slope(problem: Problem) -> Tensor:
    """Returns the derivative of a soft-capped score with respect to the score."""
    if problem.spec.softcap is None:
        return torch.ones((), dtype=torch.float64)
    q, k = (formula._per_query_head(problem, x) for x in (problem.q, problem.k))
    return 1 - torch.tanh(problem.spec.scale * (q @ k.mT) / problem.spec.softcap).square()


# Error limits


class Pairs(NamedTuple):
    """Values of every (query, key) pair from the reference, in float64: (B, Hq, Lq, Lk)."""

    problem: Problem
    visible: Tensor
    weights: Tensor  # before dropout
    lse: Tensor


def pairs_of(call: Call) -> Pairs:
    problem = make(
        *(x.double() for x in call[:3]), Options(**{name: doubled(x) for name, x in call.options.items()})
    )
    return Pairs(problem, *formula._softmax(problem))


def term_norms(t: Training, pairs: Pairs, weights: Tensor | None = None) -> dict[str, float]:
    """Estimates each gradient's norm as if all summed terms had random signs.

    If the terms of a gradient cancel (a bias that shifts whole rows), its error is relative to
    this norm, not to its own. With `weights`, returns the norm of the contribution of these weights
    alone.
    """
    p, spec = pairs.problem, pairs.problem.spec
    q, k, v = (formula._per_query_head(p, x).square() for x in (p.q, p.k, p.v))
    dout = heads_4d(spec, t.dout.double()).square()
    scale = spec.scale**2 * softcap_slope(p).square()
    keep = torch.ones_like(pairs.weights)
    if spec.dropout:
        pattern = keep_mask(p.seed, spec.dropout, spec.B, spec.Hq, spec.Lq, spec.Lk, spec.device)
        keep = pattern.double() / max(1 - spec.dropout, 1e-300)
    dp = dout @ v.mT * keep.square()
    delta = (pairs.weights.square() * dp).sum(-1, keepdim=True)
    if t.dlse is not None:
        delta = delta + t.dlse.double().view(delta.shape).square()
    sink = sink_weight(pairs).square()
    to_sink = delta * sink
    if weights is not None:
        to_sink = (weights.square() * dp).sum(-1, keepdim=True) * sink + weights.amax().square() * delta
    weights = pairs.weights if weights is None else weights
    ds = weights.square() * (dp + delta)
    squares = {
        "q": (ds * scale * k.sum(-1)[..., None, :]).sum(),
        "k": (ds * scale * q.sum(-1)[..., None]).sum(),
        "v": ((weights * keep).square() * dout.sum(-1)[..., None]).sum(),
        "bias": (ds * bias_slope(p).square()).sum() * equal_errors(t),
        "sink": to_sink.sum(),
    }
    return {name: squares[name].sqrt().item() for name in inputs(t.call)}


def equal_errors(t: Training) -> int:
    """Returns how many rows may have the same rounding errors in the gradient of the bias.

    A bias that shifts whole rows has a gradient of zero, so only rounding errors remain. Rows that
    share their dout, because it is expanded, may have equal errors, which add up without cancelling.
    """
    bias = t.call.options.get("bias")
    if not isinstance(bias, Tensor) or bias.shape[-1:] not in ((), (1,)):
        return 1
    dims = zip(t.dout.shape[:-1], t.dout.stride()[:-1], strict=True)
    return math.prod(size for size, stride in dims if stride == 0)


def bias_slope(problem: Problem) -> Tensor:
    """Returns the derivative of a score by its bias parameter: ALiBi's distance, else 1."""
    if not isinstance(problem.bias, Alibi):
        return torch.ones((), dtype=torch.float64)
    unit = problem._replace(bias=Alibi(torch.ones_like(problem.bias.slopes)))
    distances = dense_bias(unit, torch.float64)
    assert distances is not None
    return distances


def sink_weight(pairs: Pairs) -> Tensor:
    """Returns the softmax weight of the sink in each row, (B, Hq, Lq, 1)."""
    sink = formula._sink(pairs.problem)
    return torch.where(sink == -INF, 0.0, torch.exp(sink - pairs.lse[..., None]))


class Measured(NamedTuple):
    error: float
    allowed: float
    size: float  # `error` and `allowed` are relative to `size`


def errors(t: Training, actual: dict[str, Tensor], pairs: Pairs) -> dict[str, Measured]:
    """Measures each gradient's error, and the error allowed for rounding and flushed weights."""
    dtype = t.call.q.dtype
    expected = t.expected()
    # Weights below the smallest normal number become zero. The error also grows with |LSE|, because
    # scores of that size are rounded.
    tiny = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).tiny
    limit = max(computed(t.call), UNIT[dtype] * largest(pairs.lse))
    norms, flushed = term_norms(t, pairs), term_norms(t, pairs, pairs.visible.double() * 2 * tiny)
    measured = {}
    for name, g in expected.items():
        size = max(norm(g), norms[name]) or 1.0
        rounding = norm(g.to(actual[name].dtype).double() - g)
        allowed = limit * size + 1.01 * rounding + flushed[name]
        measured[name] = Measured(norm(actual[name].double() - g) / size, allowed / size, size)
    return measured


def computed(call: Call) -> float:
    """Returns the limit of the error, relative to the norm of the terms, before results are rounded."""
    return PAIRS_COMPUTED if in_pairs(call) else COMPUTED[call.q.dtype]


def gate(call: Call) -> float:
    """Returns the limit of the relative error for N(0, 1) inputs."""
    return PAIRS_GATE if in_pairs(call) else GATE[call.q.dtype]


def in_pairs(call: Call) -> bool:
    with core.use_isa(call.isa):
        return core.products(call.q.dtype) == core.PAIRS


def norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()


def faults(t: Training) -> list[str]:
    """Returns the faults of the native gradients, [] if there are none. NaN always is a fault."""
    actual, tensors, pairs = t.run(), inputs(t.call), pairs_of(t.call)
    messages = [
        f"d{name} is {x.dtype} {tuple(x.shape)}"
        for name, x in actual.items()
        if x.dtype is not tensors[name].dtype or x.shape != tensors[name].shape
    ]
    for name, x in errors(t, actual, pairs).items():
        if not x.error <= x.allowed:
            messages.append(f"d{name}: error {x.error:.3g} above {x.allowed:.3g}")
    return messages + zero_faults(actual, pairs)


def zero_faults(got: dict[str, Tensor], pairs: Pairs) -> list[str]:
    """Returns a message for each nonzero gradient of fully masked rows or unattended keys."""
    spec = pairs.problem.spec
    attended_keys = pairs.visible.view(spec.B, spec.Hkv, -1, spec.Lk).any(2)
    unused = {"q": ~pairs.visible.any(-1), "k": ~attended_keys, "v": ~attended_keys}
    return [f"d{name} is not zero where all is masked" for name, x in unused.items() if got[name][x].any()]


def failures(indices: Iterable[int], work: float) -> str:
    """Returns a report of the sampled cases with faults, empty if there are none."""
    cases = ((n, sample(n, work)) for n in indices)
    return "\n".join(f"case {n}: {'; '.join(f)} in {describe(t)}" for n, t in cases if (f := faults(t)))


def describe(t: Training) -> str:
    tensors = {n: f"<{x.dtype} {tuple(x.shape)}>" for n, x in t.call.options.items() if isinstance(x, Tensor)}
    output_grads = f"dout {t.dout.stride()}" + (" and dlse" if t.dlse is not None else "")
    return f"{t.call._replace(options=t.call.options | tensors)}, {output_grads}"


# Sampling


class GradientSampler(Sampler):
    """Samples case number `index`.

    Lengths depend on the index, so that a range of indices covers all remainders of Lq and Lk
    modulo the block sizes.
    """

    def __init__(self, index: int, work: float, isas: list[str]) -> None:
        self.index = index
        super().__init__(1_000_000 + index, work, isas)

    def sizes(self, work: float) -> None:
        """Chooses sizes. `index` gives Lq modulo 128 (tiles) and Lk modulo 96 (key blocks)."""
        while True:
            self.batch = self.choice(((1,), (1,), (2,), (3,)))
            self.Hkv, group = self.choice((1, 1, 2, 3)), self.choice((1, 1, 2, 3, 5))
            self.Hq = self.Hkv * group
            self.Lq = self.length(self.index, 128, (0, 0, 1))
            self.Lk = self.length(self.index * 5, 96, (0, 1, 2, 5, 10))
            self.D = self.choice(WIDTHS)
            self.Dv = self.D if self.chance(0.5) else self.choice(WIDTHS)
            if self.batch[0] * self.Hq * self.Lq * self.Lk * (self.D + self.Dv + 32) <= work:
                return

    def length(self, index: int, modulus: int, multiples: tuple[int, ...]) -> int:
        return index % modulus + modulus * self.choice(multiples) or modulus

    def bias(self) -> dict[str, Any]:
        kind = self.choice(("none", "none", "tensor", "tensor", "excluding", "lowest", "alibi", "relative"))
        if kind == "alibi":
            slopes = torch.rand(self.Hq, generator=self.generator) / 4
            return {"bias": Alibi(slopes.to(self.choice((torch.float32, self.dtype))))}
        if kind == "relative":
            table = self.randn(32, self.Hq, dtype=self.choice((torch.float32, self.dtype)))
            far = self.choice((20, 20 + self.Lk // 2))
            return {"bias": RelativeBias(table, bidirectional=self.chance(0.5), max_distance=far)}
        return {} if kind == "none" else {"bias": self.tensor_bias(kind)}

    def dout(self) -> Tensor:
        """Returns dout: contiguous, transposed, sliced, or expanded from one number."""
        shape, kind = (*self.batch, self.Hq, self.Lq, self.Dv), self.pick.randrange(5)
        if kind == 0:
            return self.randn(*self.batch, self.Lq, self.Hq, self.Dv).transpose(1, 2)
        if kind == 1:
            return self.randn(*self.batch, self.Hq, 2 * self.Lq, self.Dv + 3)[:, :, ::2, 1:-2]
        if kind == 2:
            return self.randn(*self.batch, self.Hq, self.Dv, self.Lq).transpose(2, 3)
        return self.randn(*shape) if kind == 3 else self.randn(1, 1, 1, 1).expand(shape)

    def training(self) -> Training:
        call, dout = self.call(), self.dout()
        dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        dlse = self.randn(*self.batch, self.Hq, self.Lq, dtype=dtype) if self.chance(0.3) else None
        return Training(call, dout, dlse)


def sample(index: int, work: float) -> Training:
    return GradientSampler(index, work, core.isas()).training()


# Guard pages


def check_guarded(index: int, isa: str) -> None:
    """Checks that gradients next to guard pages are bitwise equal to ordinary ones."""
    t, guard = sample(index, 2e6), Guard(index)
    call = t.call._replace(isa=isa)
    options = {n: guard.moved(x) if isinstance(x, Tensor) else x for n, x in call.options.items()}
    guarded_call = call._replace(
        q=guard.moved(call.q), k=guard.moved(call.k), v=guard.moved(call.v), options=options
    )
    if 0 in t.dout.stride():
        t = t._replace(dout=t.dout.contiguous())  # guarded memory holds no stride of 0
    dlse = guard.moved(t.dlse) if t.dlse is not None else None
    with guard.results():
        actual = {n: x.clone() for n, x in Training(guarded_call, guard.moved(t.dout), dlse).run().items()}
    guard.close()
    for name, x in t._replace(call=call).run().items():
        assert torch.equal(actual[name], x), f"d{name} of case {index} on {isa}: {describe(t)}"


def check_all_guarded(first: int, count: int) -> None:
    torch.set_num_threads(1)
    for index in range(first, first + count):
        for isa in core.isas():
            print(index, isa, flush=True)
            check_guarded(index, isa)


# Memory


def extra_memory(name: str) -> int:
    """Returns the peak memory in bytes of forward and backward, without the gradients.

    `name` is a case of peak_memory.py.
    """
    names = set(name.split("+"))
    input_names = names & set(INPUTS) or None
    gradients(training_with_options(names, 128), input_names)  # warm up: loads code
    return extra_of(training_with_options(names, peak_memory.L), input_names)


def training_with_options(names: set[str], tokens: int) -> Training:
    with mock.patch.object(peak_memory, "L", tokens):
        options: dict[str, Any] = {}
        for name in names & set(MEMORY_OPTIONS):
            options |= MEMORY_OPTIONS[name]()
        q, k, v = peak_memory.inputs(names)
        return training(Call(q, k, v, options, "any"), lse="lse" in names)


def extra_of_many_tokens() -> int:
    few, many = (
        training(Call(x, x, x, {"mask": M.Causal()}, "any"))
        for x in (torch.randn(1, 1, n, 64) for n in (128, 32_768))
    )
    gradients(few)
    return extra_of(many, None)


def print_extra_memory(names: Iterable[str]) -> None:
    """Prints the peak memory of each case.

    Each case forks a process, because native code keeps buffers.
    """
    torch.set_num_threads(1)
    for name in names:
        child = os.fork()
        if child == 0:
            print(name, extra_of_many_tokens() if name == "long" else extra_memory(name), flush=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def extra_of(t: Training, names: Iterable[str] | None) -> int:
    grads: dict[str, Tensor] = {}
    peak = peak_memory.measure(lambda: grads.update(gradients(t, names)))
    return peak - sum(x.numel() * x.element_size() for x in grads.values())
