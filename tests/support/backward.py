"""Gradients of calls made from a seed, what they should be, and how far they may be from it."""

from __future__ import annotations

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
    "row numbers": lambda: {"bias": torch.randn(peak_memory.H, peak_memory.L, 1)},
    "one number": lambda: {"bias": torch.randn(())},
    "narrow bias": lambda: {"bias": torch.randn(peak_memory.L, peak_memory.L).bfloat16()},
    "far": lambda: {"bias": RelativeBias(torch.randn(32, peak_memory.H), max_distance=peak_memory.L)},
    "dilated": lambda: {"mask": M.Dilated(64)},
    "scattered": lambda: {"mask": M.Documents(torch.arange(peak_memory.L) % 2)},
}
INPUTS = ("q", "k", "v", "bias", "sink")  # bias: the tensor, ALiBi's slopes or the relative table

# Relative L2 against float64 for inputs from N(0, 1), as large as means are meaningful.
GATE = {torch.float32: 1.5e-6, torch.bfloat16: 2.2e-3, torch.float16: 2.7e-4, torch.float64: 1e-12}
# What is left of it without the rounding of stored results. Sums are in float32 or float64; of a bfloat16
# output 16 bits are known, which shows where a gradient is a small difference.
COMPUTED = {torch.float32: 1.5e-6, torch.bfloat16: 1e-5, torch.float16: 1.5e-6, torch.float64: 1e-12}


class Training(NamedTuple):
    """A call, and the gradients that arrive at its output and its LSE."""

    call: Call
    dout: Tensor
    dlse: Tensor | None = None

    def run(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The native gradients of the inputs named, or of all."""
        with core.use_isa(self.call.isa):
            return gradients(self, names)

    def expected(self) -> dict[str, Tensor]:
        """Those of the reference from the same numbers, in float64."""
        return reference(self.call, self.dout, self.dlse)


def reference(call: Call, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs(call).items()}
    options = {name: doubled(x) for name, x in call.options.items()} | with_leaves(call, leaves)
    q, k, v = (leaves[name] for name in "qkv")
    results = regard.attention(q, k, v, **options, return_lse=True, impl="reference")
    given = (dout.double(), torch.zeros_like(results[1]) if dlse is None else dlse.double())
    found = torch.autograd.grad(results, list(leaves.values()), given, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def training(call: Call, lse: bool = False) -> Training:
    """Random gradients for a call, from PyTorch's generator."""
    spec = make(call.q, call.k, call.v, Options(**call.options)).spec
    dout = torch.randn(spec.out_shape).to(spec.dtype)
    return Training(call, dout, torch.randn(spec.lse_shape).to(spec.lse_dtype) if lse else None)


def inputs(call: Call) -> dict[str, Tensor]:
    """Everything that can be learned, by name."""
    given = (*call[:3], learned(call.options.get("bias")), call.options.get("sink"))
    return {name: x for name, x in zip(INPUTS, given, strict=True) if x is not None}


def with_leaves(call: Call, leaves: dict[str, Tensor]) -> dict[str, Any]:
    """The options that hold tensors to learn, with `leaves` in their place."""
    bias, options = call.options.get("bias"), {name: leaves[name] for name in ("sink",) if name in leaves}
    if isinstance(bias, Alibi):
        return options | {"bias": Alibi(leaves["bias"])}
    if isinstance(bias, RelativeBias):
        table = RelativeBias(leaves["bias"], bidirectional=bias.bidirectional, max_distance=bias.max_distance)
        return options | {"bias": table}
    return options if bias is None else options | {"bias": leaves["bias"]}


def gradients(t: Training, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The one place that knows how native gradients are asked for."""
    call, wanted = t.call, list(inputs(t.call) if names is None else names)
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs(call).items()}
    options = call.options | with_leaves(call, leaves) | {"return_lse": True, "impl": "native"}
    results = regard.attention(leaves["q"], leaves["k"], leaves["v"], **options)
    used = 1 if t.dlse is None else 2
    asked = [leaves[name] for name in wanted]
    if not asked:
        return {}
    return dict(zip(wanted, torch.autograd.grad(results[:used], asked, (t.dout, t.dlse)[:used]), strict=True))


# What they should be


def by_pairs(t: Training) -> dict[str, Tensor]:
    """d q, k and v as sums over the pairs that are visible: where float64 has a NaN, and nowhere else.

    The reference has matrix products in its backward, in which 0 * NaN is NaN.
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
    """The derivative of a capped score by the score."""
    if problem.spec.softcap is None:
        return torch.ones((), dtype=torch.float64)
    q, k = (formula._per_query_head(problem, x) for x in (problem.q, problem.k))
    return 1 - torch.tanh(problem.spec.scale * (q @ k.mT) / problem.spec.softcap).square()


# How far they may be from the reference


class Pairs(NamedTuple):
    """What the reference knows of every pair of a query and a key, in float64: (B, Hq, Lq, Lk)."""

    problem: Problem
    visible: Tensor
    weights: Tensor  # before dropout
    lse: Tensor


def pairs_of(call: Call) -> Pairs:
    problem = make(
        *(x.double() for x in call[:3]), Options(**{name: doubled(x) for name, x in call.options.items()})
    )
    return Pairs(problem, *formula._softmax(problem))


def sizes(t: Training, pairs: Pairs, weights: Tensor | None = None) -> dict[str, float]:
    """The norm that each gradient would have if the signs of all the numbers it adds up were random.

    Where they are not, and the gradient cancels to nearly nothing (a bias that shifts whole rows), this is
    the size that its error has to be seen against. With `weights`, the norm of what these alone contribute.
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
        "bias": (ds * bias_slope(p).square()).sum(),
        "sink": to_sink.sum(),
    }
    return {name: squares[name].sqrt().item() for name in inputs(t.call)}


def bias_slope(problem: Problem) -> Tensor:
    """The derivative of a score by the number that its bias is made of: ALiBi's distances, else 1."""
    if not isinstance(problem.bias, Alibi):
        return torch.ones((), dtype=torch.float64)
    unit = problem._replace(bias=Alibi(torch.ones_like(problem.bias.slopes)))
    distances = dense_bias(unit, torch.float64)
    assert distances is not None
    return distances


def sink_weight(pairs: Pairs) -> Tensor:
    """What the sink takes of each row's probability, (B, Hq, Lq, 1)."""
    sink = formula._sink(pairs.problem)
    return torch.where(sink == -INF, 0.0, torch.exp(sink - pairs.lse[..., None]))


class Measured(NamedTuple):
    error: float
    allowed: float
    size: float  # both are relative to it


def errors(t: Training, got: dict[str, Tensor], pairs: Pairs) -> dict[str, Measured]:
    """The error of each gradient, and what sums, the stored result and flushed weights explain of it."""
    dtype = t.call.q.dtype
    want = t.expected()
    # A weight below the smallest normal number is zero; a score of size |LSE| is itself rounded.
    tiny = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).tiny
    limit = max(COMPUTED[dtype], UNIT[dtype] * largest(pairs.lse))
    random, flushed = sizes(t, pairs), sizes(t, pairs, pairs.visible.double() * 2 * tiny)
    found = {}
    for name, g in want.items():
        size = max(norm(g), random[name]) or 1.0
        stored = norm(g.to(got[name].dtype).double() - g)
        allowed = limit * size + 1.01 * stored + flushed[name]
        found[name] = Measured(norm(got[name].double() - g) / size, allowed / size, size)
    return found


def norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()


def faults(t: Training) -> list[str]:
    """What is wrong with the native gradients; [] when they keep the promise. NaN is within no limit."""
    got, given, pairs = t.run(), inputs(t.call), pairs_of(t.call)
    found = [
        f"d{name} is {x.dtype} {tuple(x.shape)}"
        for name, x in got.items()
        if x.dtype is not given[name].dtype or x.shape != given[name].shape
    ]
    for name, x in errors(t, got, pairs).items():
        if not x.error <= x.allowed:
            found.append(f"d{name}: error {x.error:.3g} above {x.allowed:.3g}")
    return found + zero_faults(got, pairs)


def zero_faults(got: dict[str, Tensor], pairs: Pairs) -> list[str]:
    """Rows that see nothing, and keys that nobody sees, have gradients that are exactly zero."""
    spec = pairs.problem.spec
    seen = pairs.visible.view(spec.B, spec.Hkv, -1, spec.Lk).any(2)
    unused = {"q": ~pairs.visible.any(-1), "k": ~seen, "v": ~seen}
    return [f"d{name} is not zero where nothing is seen" for name, x in unused.items() if got[name][x].any()]


def failures(indices: Iterable[int], work: float) -> str:
    """A report of every sampled case that breaks the promise."""
    made = ((n, sample(n, work)) for n in indices)
    return "\n".join(f"case {n}: {'; '.join(f)} in {describe(t)}" for n, t in made if (f := faults(t)))


def describe(t: Training) -> str:
    tensors = {n: f"<{x.dtype} {tuple(x.shape)}>" for n, x in t.call.options.items() if isinstance(x, Tensor)}
    given = f"dout {t.dout.stride()}" + (" and dlse" if t.dlse is not None else "")
    return f"{t.call._replace(options=t.call.options | tensors)}, {given}"


# Sampling


class GradientSampler(Sampler):
    """Case n. Neighbouring cases differ in the remainders of their lengths, so that a range has them all."""

    def __init__(self, index: int, work: float, isas: list[str]) -> None:
        self.index = index
        super().__init__(1_000_000 + index, work, isas)

    def sizes(self, work: float) -> None:
        """Query tiles have up to 128 rows, key blocks 96; a chunk has from 96 keys (wide heads) up."""
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
        """Contiguous, as a projection leaves it, cut out of something larger, or one number for all."""
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
    """The same bits when every tensor, given or allocated, lies flush against forbidden pages."""
    t, guard = sample(index, 2e6), Guard(index)
    call = t.call._replace(isa=isa)
    options = {n: guard.moved(x) if isinstance(x, Tensor) else x for n, x in call.options.items()}
    moved = call._replace(
        q=guard.moved(call.q), k=guard.moved(call.k), v=guard.moved(call.v), options=options
    )
    if 0 in t.dout.stride():
        t = t._replace(dout=t.dout.contiguous())  # as it will be in guarded memory
    dlse = guard.moved(t.dlse) if t.dlse is not None else None
    with guard.results():
        found = {n: x.clone() for n, x in Training(moved, guard.moved(t.dout), dlse).run().items()}
    guard.close()
    for name, x in t._replace(call=call).run().items():
        assert torch.equal(found[name], x), f"d{name} of case {index} on {isa}: {describe(t)}"


def check_all_guarded(first: int, count: int) -> None:
    torch.set_num_threads(1)
    for index in range(first, first + count):
        for isa in core.isas():
            print(index, isa, flush=True)
            check_guarded(index, isa)


# Memory


def extra_memory(name: str) -> int:
    """Bytes that forward and backward add to the peak, beyond the gradients. `name` as in peak_memory.py."""
    names = set(name.split("+"))
    chosen = names & set(INPUTS) or None
    gradients(of_options(names, 128), chosen)  # loads code
    return extra_of(of_options(names, peak_memory.L), chosen)


def of_options(names: set[str], tokens: int) -> Training:
    with mock.patch.object(peak_memory, "L", tokens):
        options: dict[str, Any] = {}
        for each in names & set(MEMORY_OPTIONS):
            options |= MEMORY_OPTIONS[each]()
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
    """Each in a process of its own: native code keeps its working memory from call to call."""
    torch.set_num_threads(1)
    for name in names:
        child = os.fork()
        if child == 0:
            print(name, extra_of_many_tokens() if name == "long" else extra_memory(name), flush=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def extra_of(t: Training, names: Iterable[str] | None) -> int:
    found: dict[str, Tensor] = {}
    peak = peak_memory.measure(lambda: found.update(gradients(t, names)))
    return peak - sum(x.numel() * x.element_size() for x in found.values())
