"""Derivatives of `attention`: autograd, forward mode, torch.func, profilers and tracers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import jacobian
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import masks as M
from regard._autograd import ops as _ops
from regard._tools.watching import is_watched
from regard.scores import Alibi
from support import HAVE_CORE, assert_close
from support.differentiable import DV, HKV, HQ, LK, LQ, NAMES, B, Case, D, cases, tensors

pytestmark = [
    pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built"),
    # PyTorch's forward mode imports a module that uses torch.jit.script.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


def leaves(*batch: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors(*batch, dtype=dtype)]


def total(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Reduces results to a scalar whose derivatives depend on every element."""
    results = (results,) if isinstance(results, Tensor) else results
    return sum((x.masked_fill(x.isinf(), 0.0).square().sum() for x in results), torch.zeros(()))


# Finite differences


def with_lse(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = case(*inputs, return_lse=True)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    return call


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_along_a_direction(name: str) -> None:
    case = cases()[name]
    assert gradcheck(case, case.leaves(), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(case, case.leaves(), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["sink", "everything"])
def test_derivatives_of_the_lse(name: str) -> None:
    case = cases()[name]
    assert gradcheck(with_lse(case), case.leaves(), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(with_lse(case), case.leaves(), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["softcap", "bias of keys"])
def test_each_first_derivative(name: str) -> None:
    case = cases()[name]
    assert gradcheck(case, case.leaves(), check_forward_ad=True)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_each_derivative(name: str) -> None:
    case = cases()[name]
    assert gradcheck(with_lse(case), case.leaves(), check_forward_ad=True)
    assert gradgradcheck(with_lse(case), case.leaves(), check_fwd_over_rev=True)


@pytest.mark.parametrize("name", ["causal", "bias", "alibi", "everything"])
def test_reverse_over_forward(name: str) -> None:
    case = cases()[name]
    inputs = case.inputs
    directions = tuple(torch.randn_like(x) for x in inputs)

    def gradients_of(impl: str) -> tuple[Tensor, ...]:
        def tangent(*primals: Tensor) -> Tensor:
            return total(jvp(lambda *x: case(*x, impl=impl), primals, directions)[1])

        return grad(tangent, argnums=tuple(range(len(inputs))))(*inputs)

    for actual, expected in zip(gradients_of("native"), gradients_of("reference"), strict=True):
        assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# Unsupported derivatives raise


def test_third_derivatives_raise() -> None:
    q, k, v = leaves(1)
    first = torch.autograd.grad(total(regard.attention(q, k, v)), q, create_graph=True)
    second = torch.autograd.grad(total(first), (q, k, v), create_graph=True)
    for result in second:
        with pytest.raises(NotImplementedError, match=r"third derivative.*impl='reference'"):
            torch.autograd.grad(result.sum(), q, retain_graph=True)
    with pytest.raises(NotImplementedError, match="third derivative"):
        grad(lambda x: total(hessian(lambda y: total(regard.attention(y, k, v)))(x)))(q)


def test_forward_mode_of_forward_mode_raises() -> None:
    q, k, v = (x.detach() for x in leaves(1))
    with pytest.raises(NotImplementedError, match=r"forward mode of forward mode.*impl='reference'"):
        jacfwd(jacfwd(lambda x: regard.attention(x, k, v)))(q)


def test_the_older_vmap_raises() -> None:
    q, k, v = (x.detach() for x in leaves(1))
    for options in ({}, {"strategy": "forward-mode"}, {"create_graph": True}):
        with pytest.raises(NotImplementedError, match=r"older vmap.*torch\.func\.jacrev"):
            jacobian(lambda x: regard.attention(x, k, v), q.requires_grad_(), vectorize=True, **options)


def test_operators_reject_unsupported_transforms() -> None:
    x = torch.randn(1, 1, 3, 4)

    def operator(q: Tensor) -> Tensor:
        return _ops.attention_forward(
            q, x, x, None, None, None, [], None, None, [], [], 0, 1.0, None, 0.0, False
        )[0]

    with pytest.raises(NotImplementedError, match=r"call regard\.attention under torch\.func"):
        grad(lambda q: operator(q).sum())(x)
    with pytest.raises(NotImplementedError, match=r"call regard\.attention under torch\.func"):
        jvp(operator, (x,), (x,))
    assert torch.equal(vmap(operator)(x[None]), regard.attention(x, x, x, scale=1.0)[None])


def test_operators_check_their_arguments() -> None:
    x = torch.randn(1, 1, 3, 4)
    other_arguments = (None, None, None, [], None, None, [], [], 0, 1.0, None, 0.0, False)
    for k in (x[..., :3], x.expand(2, -1, -1, -1), x[:, :, :2]):
        with pytest.raises(ValueError, match=r"do not fit together.*call regard\.attention"):
            _ops.attention_forward(x, k, x, *other_arguments)


# Autograd


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_replay_dropout(reentrant: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=M.Causal(), dropout=0.4)

    inputs = leaves(B)
    torch.manual_seed(1)
    expected = torch.autograd.grad(total(call(*inputs)), inputs)
    torch.manual_seed(1)
    total(checkpoint(call, *inputs, use_reentrant=reentrant)).backward()
    for x, want in zip(inputs, expected, strict=True):  # forward without grad: other rounding
        torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-6)


def test_saved_tensor_hooks() -> None:
    """Hooks may change the layout of saved tensors. No saved tensor has size Lq x Lk."""
    inputs, saved_shapes = [*leaves(B), torch.randn(HQ, requires_grad=True)], []
    mask = M.Lengths(torch.tensor([2, 5]))

    def pack(x: Tensor) -> Any:
        saved_shapes.append(tuple(x.shape))
        return x.transpose(0, -1).contiguous().numpy(force=True)

    def call() -> Tensor:
        q, k, v, sink = inputs
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        return total(regard.attention(q, k, v, mask=mask, sink=sink))

    with saved_tensors_hooks(pack, lambda x: torch.from_numpy(x).transpose(0, -1)):
        loss = call()
    got, want = torch.autograd.grad(loss, inputs), torch.autograd.grad(call(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    shapes = [(B, HQ, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV), (HQ,), (B, HQ, LQ, DV), (2, B, HQ, LQ), (2,)]
    assert saved_shapes[: len(shapes)] == shapes


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "sink", "mask", "out", "seed"])
def test_in_place_changes_are_detected(which: str) -> None:
    names = {"q": (HQ, LQ, D), "k": (HKV, LK, D), "v": (HKV, LK, DV), "bias": (LQ, LK), "sink": (HQ,)}
    arguments: dict[str, Tensor] = {n: torch.randn(size).requires_grad_() * 1 for n, size in names.items()}
    arguments |= {"mask": torch.rand(LQ, LK) > 0.2, "seed": torch.tensor(3)}
    out = regard.attention(**arguments, dropout=0.1)
    loss = out.sum()
    (arguments | {"out": out})[which].zero_()
    if which == "seed":  # the call has read the seed already
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_backward_runs_once_unless_the_graph_is_retained() -> None:
    q, k, v = leaves(B)
    loss = total(regard.attention(q, k, v))
    first = torch.autograd.grad(loss, q, retain_graph=True)[0]
    second = torch.autograd.grad(loss, q)[0]
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, q)


@pytest.mark.parametrize("learn", range(5))
def test_only_inputs_that_require_grad_get_gradients(learn: int) -> None:
    inputs = [*tensors(B, dtype=torch.float32), torch.randn(LQ, LK), torch.randn(HQ)]
    inputs[learn].requires_grad_()
    q, k, v, bias, sink = inputs
    total(regard.attention(q, k, v, bias=bias, sink=sink)).backward()
    assert [x.grad is not None for x in inputs] == [index == learn for index in range(5)]


def test_no_grad_records_no_graph() -> None:
    inputs = leaves(B)
    with torch.no_grad():
        assert not regard.attention(*inputs).requires_grad
    with torch.inference_mode():
        assert regard.attention(*inputs).is_inference()
    assert regard.attention(*inputs).requires_grad


def test_gradients_of_out_or_lse_alone() -> None:
    q, k, v = leaves(B, dtype=torch.float64)
    for impl in ("native", "reference"):
        out, lse = regard.attention(q, k, v, return_lse=True, impl=impl)
        grads = [
            torch.autograd.grad(loss, (q, k, v), retain_graph=True, allow_unused=True, materialize_grads=True)
            for loss in (out.square().sum(), lse.square().sum(), total((out, lse)))
        ]
        for of_out, of_lse, both in zip(*grads, strict=True):
            assert_close(of_out + of_lse, both, rtol=1e-10, atol=1e-12)
        assert not grads[1][2].any(), "the LSE does not depend on v"
    assert regard.attention(q, k, v).grad_fn.name() == "RegardAttentionBackward"


def test_gradients_of_any_strides() -> None:
    q, k, v = leaves(B)
    dout = torch.randn(DV, LQ, HQ, B).permute(3, 2, 1, 0)
    got = torch.autograd.grad(regard.attention(q, k, v), (q, k, v), dout)
    want = torch.autograd.grad(regard.attention(q, k, v), (q, k, v), dout.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    ones = torch.autograd.grad(regard.attention(q, k, v).sum(), v)[0]
    assert_close(ones, torch.autograd.grad(regard.attention(q, k, v), v, torch.ones(B, HQ, LQ, DV))[0])


def test_backward_drops_the_weights_that_forward_drops() -> None:
    """d out / d v is the weight matrix after dropout, so it shows the weights of backward."""
    q, k, v = tensors(dtype=torch.float64)
    v = torch.randn(HKV, LK, 1, dtype=torch.float64)
    torch.manual_seed(7)
    jacobian_of_v = jacrev(lambda v: regard.attention(q, k, v, dropout=0.5, seed=11))(v)[:, :, 0, :, :, 0]
    weights = regard.weights(q, k, v, dropout=0.5, seed=11)
    group = HQ // HKV
    for head in range(HQ):
        assert_close(jacobian_of_v[head, :, head // group], weights[head])
    assert (weights == 0).any()


def test_calls_from_many_threads() -> None:
    torch.set_num_threads(1)
    inputs = [[x.detach().requires_grad_() for x in leaves(B)] for _ in range(8)]
    serial = [gradients(x) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        repeated = (gradients(inputs[index]) for _ in range(25))
        wrong.extend(index for got in repeated if not all(map(torch.equal, got, serial[index])))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def gradients(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    out = regard.attention(*inputs, mask=M.Causal(), dropout=0.3, seed=1)
    return torch.autograd.grad(total(out), inputs)


# torch.func


def two_backends(transform: Callable[[Callable[..., Any]], Any]) -> tuple[Any, Any]:
    def call(impl: str) -> Callable[..., Tensor]:
        return lambda *x: regard.attention(*x, mask=M.Causal(), softcap=2.0, impl=impl)

    return transform(call("native")), transform(call("reference"))


def check_close(got: Any, want: Any) -> None:
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_transforms_of_functions() -> None:
    x = tensors(1)
    t = tuple(torch.randn_like(y) for y in x)
    check_close(*two_backends(lambda f: grad(lambda *x: total(f(*x)), argnums=(0, 1, 2))(*x)))
    check_close(*two_backends(lambda f: vjp(f, *x)[1](torch.ones(1, HQ, LQ, DV, dtype=torch.float64))))
    check_close(*two_backends(lambda f: jvp(f, x, t)))
    check_close(*two_backends(lambda f: jacrev(f, argnums=(0, 1, 2))(*x)))
    check_close(*two_backends(lambda f: jacfwd(f, argnums=(0, 2))(*x)))


def test_transforms_of_transforms() -> None:
    q, k, v = tensors(1)
    small = q[..., :2, :]

    def of_k(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda k: total(f(small, k, v))

    check_close(*two_backends(lambda f: grad(lambda k: total(grad(of_k(f))(k)))(k)))
    check_close(*two_backends(lambda f: jacrev(jacrev(of_k(f)))(k)))
    check_close(*two_backends(lambda f: hessian(of_k(f))(k)))
    check_close(*two_backends(lambda f: jacrev(jacfwd(of_k(f)))(k)))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 24)
        self.sink = torch.nn.Parameter(torch.randn(2))
        self.bias = torch.nn.Parameter(torch.randn(2, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(-1, 3, 2, 4).permute(1, 2, 0, 3)
        return regard.attention(q, k, v, mask=M.Causal(), sink=self.sink, bias=self.bias)


def test_gradients_of_each_sample() -> None:
    layer = Layer()
    x, parameters = torch.randn(5, 7, 8), dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return total(functional_call(layer, parameters, (x,)))

    mapped = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    one_by_one = [grad(loss)(parameters, sample) for sample in x]
    for name, got in mapped.items():
        assert_close(got, torch.stack([g[name] for g in one_by_one]), atol=1e-5)


# vmap: results must match a loop

N = 3
MAPPED: dict[str, tuple[tuple[int | None, ...], Callable[..., Any]]] = {
    "all": ((0, 0, 0), lambda q, k, v: regard.attention(q, k, v, mask=M.Causal())),
    "q only": ((0, None, None), lambda q, k, v: regard.attention(q, k, v, return_lse=True)),
    "k only": ((None, 0, None), regard.attention),
    "other dims": ((2, 1, 3), regard.attention),
    "bias too": ((0, 0, 0, 0), lambda q, k, v, b: regard.attention(q, k, v, bias=b, softcap=1.0)),
    "bias only": ((None, None, None, 1), lambda q, k, v, b: regard.attention(q, k, v, bias=b)),
    "mask": ((0, 0, 0, 2), lambda q, k, v, b: regard.attention(q, k, v, mask=b > 0)),
    "slopes": ((0, 0, 0, 0), lambda q, k, v, b: regard.attention(q, k, v, bias=Alibi(b[0, :, 0, 0]))),
    "sink": ((None, 0, 0, 0), lambda q, k, v, b: regard.attention(q, k, v, sink=b[0, :, 0, 0])),
    "dropout": ((0, 0, 0), lambda q, k, v: regard.attention(q, k, v, dropout=0.5, seed=2)),
    "16 bits": ((0, 0, None), lambda q, k, v: regard.attention(q.half(), k.half(), v.half())),
}


def mapped_inputs(dims: tuple[int | None, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = ((B, HQ, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV), (1, HQ, LQ, LK))[: len(dims)]
    stacked = [torch.randn(N, *size, dtype=dtype) for size in sizes]
    return [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(stacked, dims, strict=True)]


def map_by_loop(f: Callable[..., Any], dims: tuple[int | None, ...], inputs: list[Tensor]) -> Any:
    def pick(index: int) -> list[Tensor]:
        return [x if dim is None else x.select(dim, index) for x, dim in zip(inputs, dims, strict=True)]

    results = [f(*pick(index)) for index in range(N)]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(outputs) for outputs in zip(*results, strict=True))


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_matches_a_loop(name: str) -> None:
    dims, f = MAPPED[name]
    inputs = mapped_inputs(dims)
    got, want = vmap(f, in_dims=dims)(*inputs), map_by_loop(f, dims, inputs)
    for x, y in zip(*((z if isinstance(z, tuple) else (z,)) for z in (got, want)), strict=True):
        assert_close(x, y, rtol=2e-3 if name == "16 bits" else 1e-5)


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_of_grad_and_grad_of_vmap(name: str) -> None:
    dims, f = MAPPED[name]
    dtype = torch.float32 if name == "16 bits" else torch.float64
    tolerance = {"rtol": 5e-2, "atol": 5e-3} if name == "16 bits" else {"rtol": 1e-9, "atol": 1e-10}
    inputs = mapped_inputs(dims, dtype)
    argnums = tuple(range(len(inputs)))

    def gradient(*x: Tensor) -> tuple[Tensor, ...]:
        return grad(lambda *x: total(f(*x)), argnums=argnums)(*x)

    per_sample = vmap(gradient, in_dims=dims)(*inputs)
    for x, y in zip(per_sample, map_by_loop(gradient, dims, inputs), strict=True):
        assert_close(x, y, **tolerance)
    summed = grad(lambda *x: total(vmap(f, in_dims=dims)(*x)), argnums=argnums)(*inputs)
    for x, y, dim in zip(summed, per_sample, dims, strict=True):
        assert_close(x, y.sum(0) if dim is None else y.movedim(0, dim), **tolerance)


def test_nested_vmap() -> None:
    q, k, v = (x.unflatten(0, (2, 3)) for x in tensors(6, 1))
    got = vmap(vmap(regard.attention), in_dims=(1, 1, 1), out_dims=1)(q, k, v)
    assert_close(got, regard.attention(q, k, v))
    got = vmap(vmap(regard.attention, in_dims=(0, None, None)), in_dims=(None, 0, 0))(q[0], k[:, 0], v[:, 0])
    want = torch.stack(
        [
            torch.stack([regard.attention(x, y, z) for x in q[0]])
            for y, z in zip(k[:, 0], v[:, 0], strict=True)
        ]
    )
    assert_close(got, want)


def test_vmap_over_lengths_and_offsets() -> None:
    q, k, v = tensors(N, B)
    n = torch.tensor([[1, 5], [2, 3], [5, 0]])
    for f in (
        lambda q, k, v, n: regard.attention(q, k, v, mask=M.Lengths(n)),
        lambda q, k, v, n: regard.attention(q, k, v, mask=M.Causal(), offset=n),
    ):
        assert_close(vmap(f)(q, k, v, n), map_by_loop(f, (0, 0, 0, 0), [q, k, v, n]))
        shared = vmap(f, in_dims=(0, 0, 0, None))(q, k, v, n[0])
        assert_close(shared, map_by_loop(f, (0, 0, 0, None), [q, k, v, n[0]]))


def test_vmap_needs_a_randomness_mode() -> None:
    ones = torch.ones(N, 1, 2, 64, 4)

    def call(x: Tensor) -> Tensor:
        return regard.attention(x, x, x, dropout=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(ones)
    first, second, _ = vmap(call, randomness="different")(ones)
    assert not torch.equal(first, second)
    first, second, _ = vmap(call, randomness="same")(ones)
    assert torch.equal(first, second)


# Autocast and dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_autocast_matches_sdpa(dtype: torch.dtype, given: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=given, requires_grad=True) for _ in range(3))
    bias, sink = torch.randn(6, 6, dtype=given, requires_grad=True), torch.randn(2, requires_grad=True)
    with torch.autocast("cpu", dtype):
        sdpa_out = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
        out = regard.attention(q, k, v, bias=bias)
        with_sink = regard.attention(q, k, v, sink=sink)
        assert regard.attention(q, k, v, bias=bias, impl="reference").dtype is sdpa_out.dtype
    assert out.dtype is sdpa_out.dtype is with_sink.dtype
    assert_close(out, sdpa_out, rtol=2e-2, atol=2e-2)
    (out.sum() + with_sink.sum()).backward()
    assert q.grad.dtype is given
    assert (bias.grad.dtype, sink.grad.dtype) == (given, torch.float32)


def test_mixed_dtypes_need_autocast() -> None:
    q, k, v = tensors(1, dtype=torch.float32)
    with pytest.raises(TypeError, match="k: expected q's dtype"):
        regard.attention(q, k.bfloat16(), v)
    with torch.autocast("cpu", torch.bfloat16):
        assert regard.attention(q, k.bfloat16(), v).dtype is torch.bfloat16
        with pytest.raises(TypeError, match="k: expected q's dtype"):
            regard.attention(q.double(), k, v.double())


# Watched calls


def test_is_watched() -> None:
    x = torch.randn(1, 2, 3, 4)
    assert not is_watched(x, torch.nn.Parameter(x), x)
    watched: list[bool] = []

    def record(x: Tensor) -> Tensor:
        watched.append(is_watched(x, x, x))
        return x

    with FlopCounterMode(display=False):
        record(x)
    vmap(record)(x)
    grad(lambda x: record(x).sum())(x)
    make_fx(record)(x)
    with torch.autograd.profiler.profile():
        record(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(record, x, check_trace=False)
    record(x.as_subclass(type("Other", (Tensor,), {})))
    assert watched == [True] * 7


def test_flops_of_both_passes() -> None:
    q, k, v = (torch.randn(2, H, 40, d, requires_grad=True) for H, d in ((4, 8), (2, 8), (2, 6)))
    mask = M.Causal() & M.Lengths(torch.tensor([40, 11]))
    plan = regard.plan(q, k, v, mask=mask)
    pairs = plan.flops // (2 * (8 + 6))
    with FlopCounterMode(display=False) as forward:
        out = regard.attention(q, k, v, mask=mask)
    assert forward.get_total_flops() == plan.flops < 2 * 2 * 4 * 40 * 40 * (8 + 6)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert backward.get_total_flops() == 2 * pairs * (3 * 8 + 2 * 6)
    with FlopCounterMode(display=False) as values:
        torch.autograd.grad(regard.attention(q.detach(), k.detach(), v, mask=mask).sum(), v)
    assert values.get_total_flops() == plan.flops + 2 * pairs * (8 + 6)


def test_watched_calls_give_the_same_result() -> None:
    q, k, v = tensors(B, dtype=torch.float32)
    for options in ({}, {"mask": M.Causal()}, {"dropout": 0.5}, {"return_lse": True}):
        torch.manual_seed(4)
        expected = regard.attention(q, k, v, **options)
        torch.manual_seed(4)
        with FlopCounterMode(display=False):
            watched = regard.attention(q, k, v, **options)
        for x, y in zip(*((z if isinstance(z, tuple) else (z,)) for z in (expected, watched)), strict=True):
            assert torch.equal(x, y)


def test_profilers_record_the_operators() -> None:
    inputs = leaves(B)
    with torch.autograd.profiler.profile() as profile:
        regard.attention(*inputs).sum().backward()
    names = {event.name for event in profile.function_events}
    assert {"regard::attention_forward", "regard::attention_backward"} <= names


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operators(mode: str) -> None:
    def gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.autograd.grad(total(regard.attention(q, k, v, mask=M.Causal())), q)[0]

    graph = make_fx(gradient, tracing_mode=mode)(*leaves(B))
    targets = {str(node.target) for node in graph.graph.nodes}
    assert {"regard.attention_forward.default", "regard.attention_backward.default"} <= targets
    inputs = leaves(B)
    assert_close(graph(*inputs), gradient(*inputs))


def test_traces_are_not_constants() -> None:
    q, k, v = tensors(B, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about tracing and about comparing sizes
        traced = torch.jit.trace(lambda q, k, v: regard.attention(q, k, v, mask=M.Causal()), (q, k, v))
    assert_close(traced(-q, k, v), regard.attention(-q, k, v, mask=M.Causal()))


def test_subclasses_of_tensors() -> None:
    class Other(Tensor):
        pass

    q, k, v = tensors(B, dtype=torch.float32)
    out = regard.attention(q.as_subclass(Other), k, v)
    assert type(out) is Other
    assert_close(out.as_subclass(Tensor), regard.attention(q, k, v))


def test_negated_views_inside_transforms() -> None:
    q, k, v = tensors(B, dtype=torch.float32)
    lazy = torch.complex(q, q).conj().imag
    assert lazy.is_neg()
    assert_close(vmap(regard.attention)(lazy, k, v), regard.attention(-q, k, v))
    got = torch.autograd.grad(regard.attention(lazy.requires_grad_(), k, v).sum(), lazy)[0]
    assert_close(got, grad(lambda q: regard.attention(q, k, v).sum())(-q))


def test_forward_mode_of_dual_tensors() -> None:
    q, k, v = tensors(B)
    t = torch.randn_like(k)
    with forward_ad.dual_level():
        out, lse = regard.attention(q, forward_ad.make_dual(k, t), v, return_lse=True)
        tangents = [forward_ad.unpack_dual(x).tangent for x in (out, lse)]
    _, want = jvp(lambda k: regard.attention(q, k, v, return_lse=True, impl="reference"), (k,), (t,))
    for x, y in zip(tangents, want, strict=True):
        assert_close(x, y, rtol=1e-10)
