"""Linear attention: chunks against the recurrence, states, gradients, causality, padding."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard
from regard import LinearState, linear_attention
from regard._api.linear_attention import FEATURE_MAPS
from regard._call.linear import SEGMENT
from support import HAVE_CORE, assert_close, rel_l2
from support.linear import FORMS, SIZES, Case, differentiate, make, sample

needs_core = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
# Limits of the relative L2 error: the error of the arithmetic plus one rounding of the output.
ERROR = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
NAN = float("nan")


def check_agreement(actual: Case, expected: Case, dtype: torch.dtype, impl: str) -> None:
    out, state = actual.run(impl)
    true_out, true_state = expected.run("reference")
    assert out.dtype is dtype
    assert rel_l2(out, true_out) < ERROR[dtype]
    for x, y in zip(state, true_state, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
            assert rel_l2(x, y) < (1e-13 if dtype is torch.float64 else 2e-6)


# Against the recurrence


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("L", SIZES)
def test_chunks_match_the_recurrence(isa: str, poison: None, form: str, L: int) -> None:
    case = make(form, L, ragged=L == 97)
    check_agreement(case, case, torch.float32, "native")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", list(ERROR))
def test_dtypes(isa: str, poison: None, form: str, dtype: torch.dtype) -> None:
    case = make(form, 65, D=16, Dv=32, dtype=dtype)
    check_agreement(case, case, dtype, "native")


@pytest.mark.parametrize("form", FORMS)
def test_torch_backend_matches_the_recurrence(form: str) -> None:
    for L in (0, 1, 63, 65, 129):
        case = make(form, L, ragged=L == 65)
        check_agreement(case, case, torch.float32, "torch")


@needs_core
@given(seed=st.integers(0, 10**6))
def test_any_call(seed: int) -> None:
    case = sample(seed)
    check_agreement(case, case, case.q.dtype, "native")


@needs_core
@pytest.mark.parametrize("form", FORMS)
def test_many_tokens(form: str) -> None:
    case = make(form, 3001, B=1, Hq=1, Hkv=1, D=64, Dv=64, state=False)
    assert rel_l2(case.run()[0], case.run("reference")[0]) < 1e-5


def test_gated_delta_rule_of_transformers() -> None:
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    case = make("gated delta", 70, Hq=3, Hkv=3, D=16, Dv=24)
    first = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
    gates = (case.options[name].transpose(1, 2) for name in ("log_decay", "beta"))
    out, S = qwen3_next.torch_recurrent_gated_delta_rule(
        *first, *gates, initial_state=case.options["state"].S.clone(), output_final_state=True
    )
    result, state = case.run("auto")
    assert_close(result.transpose(1, 2), out)
    assert_close(state.S, S)


def test_the_formula_of_the_first_paper() -> None:
    """Compares with equation 9 of Katharopoulos et al. 2020, which introduced linear attention."""
    q, k, v = torch.randn(3, 1, 1, 20, 6, dtype=torch.float64).unbind()
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    weights = (phi_q @ phi_k.mT).tril()
    expected = weights @ v / weights.sum(-1, keepdim=True)
    assert_close(linear_attention(q, k, v, feature_map="elu+1", normalize=True), expected, rtol=1e-12)


# States


@needs_core
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(1,) * 9, (40, 1, 1, 70), (0, 33, 64)])
def test_chunks_with_a_state_match_one_call(form: str, sizes: tuple[int, ...]) -> None:
    case = make(form, sum(sizes))
    expected, expected_state = case.run()
    state, outs, at = case.options["state"], [], 0
    for n in sizes:
        gates = {
            name: x[..., at : at + n] for name, x in case.options.items() if name in ("log_decay", "beta")
        }
        options = case.options | gates | {"state": state}
        out, state = Case(*(x[:, :, at : at + n] for x in case[:3]), options).run()
        outs.append(out)
        at += n
    assert_close(torch.cat(outs, 2), expected, rtol=1e-5, atol=1e-5)
    assert_close(state.S, expected_state.S, rtol=1e-5, atol=1e-5)


@needs_core
def test_a_state_is_not_changed() -> None:
    case = make("normalized decayed", 40)
    before = [x.clone() for x in case.options["state"]]
    case.run()
    assert all(torch.equal(x, y) for x, y in zip(case.options["state"], before, strict=True))


# Non-causal


@pytest.mark.parametrize("normalize", [False, True])
def test_non_causal(normalize: bool) -> None:
    case = make("normalized", 40, state=False, dtype=torch.float64)
    q = case.q[:, :, :13]
    lengths = torch.tensor([40, 7])
    options: dict[str, Any] = {"causal": False, "normalize": normalize, "lengths": lengths}
    out = linear_attention(q, case.k, case.v, **options)
    k, v = (x.repeat_interleave(2, 1) for x in (case.k, case.v))
    weights = (q @ k.mT) / 17**0.5 * (torch.arange(40) < lengths[:, None])[:, None, None]
    expected = weights @ v / (weights.sum(-1, keepdim=True) if normalize else 1)
    assert_close(out, expected)
    assert_close(linear_attention(q, case.k, case.v, **options, impl="reference"), expected)


def test_non_causal_state_over_two_halves_of_the_keys() -> None:
    case = make("normalized", 40, state=False)
    options: dict[str, Any] = {"causal": False, "normalize": True}
    expected = linear_attention(*case[:3], **options)
    _, state = linear_attention(case.q, case.k[:, :, :30], case.v[:, :, :30], **options, return_state=True)
    assert_close(
        linear_attention(case.q, case.k[:, :, 30:], case.v[:, :, 30:], **options, state=state), expected
    )


# Gradients


def compare(case: Case, impl: str, error: float) -> None:
    actual, expected = differentiate(case, impl), differentiate(case, "reference")
    for name, x in expected.by_input.items():
        assert rel_l2(actual.by_input[name], x) < error, name
        assert actual.by_input[name].dtype is case.inputs[name].dtype


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("L", [3, 65])
def test_gradients(isa: str, poison: None, form: str, L: int) -> None:
    compare(make(form, L, ragged=L == 65), "native", 1e-5)


@needs_core
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_dtypes(poison: None, form: str, dtype: torch.dtype) -> None:
    compare(make(form, 40, dtype=dtype), "native", {torch.float64: 1e-11}.get(dtype, 2 * ERROR[dtype]))


@pytest.mark.skipif(not HAVE_CORE, reason="the core has the other number")
def test_segments_of_the_core() -> None:
    from regard import _core

    assert SEGMENT == _core.LINEAR_SEGMENT


@needs_core
@pytest.mark.parametrize("form", FORMS)
def test_gradients_over_segments(form: str) -> None:
    """Native backward recomputes states from one that is saved every 512 tokens."""
    case = make(form, 1100, B=1, Hq=1, Hkv=1, D=8, Dv=8, dtype=torch.float64)
    compare(case, "native", 1e-10)


@needs_core
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: str) -> None:
    case = make(form, 3, B=1, Hq=2, Hkv=1, D=2, Dv=2, dtype=torch.float64).requiring_grad()
    names = list(case.inputs)

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        x = dict(zip(names, inputs, strict=True))
        options = case.options | {n: x[n] for n in ("log_decay", "beta") if n in x}
        options["state"] = LinearState(x["S"], x.get("z"))
        out, state = Case(x["q"], x["k"], x["v"], options).run()
        return tuple(y for y in (out, *state) if y is not None)

    assert gradcheck(call, tuple(case.inputs.values()))
    assert gradgradcheck(call, tuple(case.inputs.values()), fast_mode=True)


@needs_core
def test_gradients_of_the_state_alone() -> None:
    case = make("decayed", 20, state=False, dtype=torch.float64).requiring_grad()
    grads = {}
    for impl in ("native", "reference"):
        _, state = case.run(impl)
        grads[impl] = torch.autograd.grad(state.S.sum(), (case.k, case.v))
    for x, y in zip(grads["native"], grads["reference"], strict=True):
        assert_close(x, y)


@needs_core
def test_gradient_of_a_per_head_decay() -> None:
    case = make("plain", 40, dtype=torch.float64, state=False).requiring_grad()
    decay = torch.tensor([-0.3, -0.1], dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(linear_attention(*case[:3], log_decay=decay, impl=impl).square().sum(), decay)[0]
        for impl in ("native", "reference")
    ]
    assert_close(*grads)


# Causality, padding, equal bits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "beta"])
def test_causality(isa: str, form: str, name: str) -> None:
    case = make(form, 70, state=False)
    clean, _ = case.run()
    if name not in case.inputs:
        return
    for at in (0, 4, 31, 37, 69):
        spoiled = case.requiring_grad()
        with torch.no_grad():
            x = spoiled.inputs[name]
            (x[:, :, at] if x.ndim == 3 else x[:, :, at, 0]).fill_(NAN)
            out, _ = spoiled.run()
        assert torch.equal(out[:, :, :at], clean[:, :, :at])
        assert out[:, :, at].isnan().any()
        if name != "q":
            assert out[:, :, at:].isnan().any(-1).all()
        else:
            assert torch.equal(out[:, :, at + 1 :], clean[:, :, at + 1 :])


@pytest.mark.parametrize("form", FORMS)
def test_nan_in_padding_changes_no_bit(isa: str, form: str) -> None:
    case = make(form, 70, ragged=True)
    clean = differentiate(case)
    spoiled = case.requiring_grad()
    with torch.no_grad():
        for name, x in spoiled.inputs.items():
            for b, n in enumerate(case.options["lengths"].tolist()):
                if name not in ("S", "z"):
                    x[b, :, n:] = NAN
    results = differentiate(spoiled)
    assert torch.equal(results.out, clean.out)
    for b, n in enumerate(case.options["lengths"].tolist()):
        assert not results.out[b, :, n:].any()
    for name, x in clean.by_input.items():
        assert torch.equal(results.by_input[name], x), name


@needs_core
@pytest.mark.parametrize("form", FORMS)
def test_threads_and_batches_change_no_bit(form: str) -> None:
    case = make(form, 200, B=3, Hq=6, Hkv=3, D=32, Dv=32)
    torch.set_num_threads(1)
    one = differentiate(case)
    torch.set_num_threads(2)
    two = differentiate(case)
    assert torch.equal(one.out, two.out)
    for name, x in one.by_input.items():
        assert torch.equal(two.by_input[name], x), name
    options = {n: x[1:2] if isinstance(x, Tensor) else x for n, x in case.options.items()}
    options["state"] = LinearState(*(x if x is None else x[1:2] for x in case.options["state"]))
    alone, _ = Case(*(x[1:2] for x in case[:3]), options).run()
    assert torch.equal(alone, one.out[1:2])


@needs_core
@pytest.mark.parametrize("decay", [-1e4, -80.0, -3.0, 0.0])
@pytest.mark.parametrize("form", ["decayed", "gated delta"])
def test_any_decay(decay: float, form: str) -> None:
    case = make(form, 70, state=False)
    case.options["log_decay"] = case.options["log_decay"] + decay * (torch.arange(70) % 7 == 3)
    check_agreement(case, case, torch.float32, "native")
    compare(case, "native", 2e-5)


@needs_core
def test_rows_without_weight_are_zeros() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()
    k = k.abs()
    q, k[:, :, :35] = q.abs(), 0
    for impl in ("native", "torch", "reference"):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        out = linear_attention(*x, normalize=True, impl=impl)
        assert not out[:, :, :35].any()
        assert_close(out[:, :, 35], v[:, :, 35])
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), x))


# Shapes and layouts


@needs_core
def test_memory_order_and_ranks() -> None:
    q, k, v = (torch.randn(2, 30, 4, 8).transpose(1, 2) for _ in range(3))
    out = linear_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    flat = linear_attention(q[0, 0], k[0, 0], v[0, 0], return_state=True)
    assert flat[0].shape == (30, 8)
    assert flat[1].S.shape == (8, 8)
    assert_close(flat[0], out[0, 0])
    assert_close(linear_attention(q[0], k[0], v[0]), out[0])
    many = linear_attention(*(x.reshape(2, 1, 4, 30, 8) for x in (q, k, v)))
    assert_close(many[:, 0], out)
    shared = linear_attention(q, k[:1], v[:1])
    assert_close(shared, linear_attention(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)))


@needs_core
def test_keys_may_be_expanded_views() -> None:
    q, k, v = torch.randn(1, 6, 40, 8), torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8)
    decay = -torch.rand(6)
    by_head = linear_attention(q, k.expand(-1, 6, -1, -1), v.expand(-1, 6, -1, -1), log_decay=decay)
    for h in range(6):
        assert_close(
            by_head[:, h : h + 1], linear_attention(q[:, h : h + 1], k, v, log_decay=decay[h].item())
        )


@needs_core
@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape, requires_grad=True)
    for impl in ("native", "torch", "reference"):
        out, state = linear_attention(q, q, q, impl=impl, return_state=True)
        assert out.shape == shape
        assert not state.S.any()
    linear_attention(q, q, q).sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", [pytest.param("native", marks=needs_core), "torch", "reference"])
def test_results_of_no_tokens_depend_on_every_input(form: str, impl: str) -> None:
    case = make(form, 0, dtype=torch.float64).requiring_grad()
    for name, x in case.inputs.items():
        for other, y in case.inputs.items():
            y.requires_grad_(other == name)
        out, state = case.run(impl)
        for result in (out, *state):
            assert result is None or result.grad_fn is not None
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_queries_without_keys_keep_their_graph(impl: str) -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4, requires_grad=True)
    out = linear_attention(q, k, k, causal=False, impl=impl)
    assert not out.any()
    out.sum().backward()
    assert k.grad is not None


# Feature maps


@pytest.mark.parametrize("name", list(FEATURE_MAPS))
def test_named_feature_maps(name: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()
    phi = FEATURE_MAPS[name]
    assert_close(linear_attention(q, k, v, feature_map=name), linear_attention(phi(q), phi(k), v))


def test_a_feature_map_may_change_the_width() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()

    def both_signs(x: Tensor) -> Tensor:
        return torch.cat([x.relu(), (-x).relu()], -1)

    out, state = linear_attention(q, k, v, feature_map=both_signs, return_state=True)
    assert state.S.shape == (1, 2, 16, 8)
    assert_close(out, linear_attention(both_signs(q), both_signs(k), v))


# Transforms, compilers, profilers


@needs_core
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_and_compilers() -> None:
    q, k, v = torch.randn(3, 5, 2, 20, 4).unbind()
    expected = linear_attention(q, k, v)
    assert_close(torch.func.vmap(linear_attention)(q, k, v), expected)
    compiled: Callable[..., Tensor] = torch.compile(linear_attention, backend="eager", fullgraph=True)
    assert_close(compiled(q, k, v), expected)
    _, tangent = torch.func.jvp(lambda x: linear_attention(x, k, v), (q,), (q,))
    assert_close(tangent, expected)
    with pytest.raises(NotImplementedError, match="must see every operation"):
        torch.func.vmap(lambda *x: linear_attention(*x, impl="native"))(q, k, v)


@needs_core
def test_profiled_calls_use_the_native_kernel() -> None:
    q = torch.randn(1, 2, 40, 8)
    expected = linear_attention(q, q, q)
    with torch.profiler.profile():
        profiled = linear_attention(q, q, q)
    assert torch.equal(expected, profiled)


def test_a_state_can_be_pickled() -> None:
    _, state = make("normalized", 5).run("torch")
    unpickled = pickle.loads(pickle.dumps(state))
    assert isinstance(unpickled, LinearState)
    assert torch.equal(unpickled.S, state.S)


# Messages

X = torch.zeros(2, 4, 5, 8)
Z = torch.zeros(2, 2, 5, 8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": Z[:, :, :3], "v": Z[:, :, :3]}, ValueError, "k: expected Lk = Lq = 5 with causal=True"),
        ({"causal": 1}, TypeError, "causal: expected a bool, got int 1"),
        ({"normalize": None}, TypeError, "normalize: expected a bool, got NoneType None"),
        ({"causal": False, "log_decay": -1.0}, ValueError, "log_decay: expected None with causal=False"),
        ({"causal": False, "beta": 0.5}, ValueError, "beta: expected None with causal=False"),
        ({"beta": 0.5, "normalize": True}, ValueError, "normalize: expected False with beta"),
        ({"log_decay": "slow"}, TypeError, "log_decay: expected a number or a tensor, got str 'slow'"),
        (
            {"log_decay": torch.zeros(4)}, ValueError,
            r"log_decay: expected \(Hkv,\) = \(2,\) or a shape broadcastable to \(..., Hkv, L\) = "
            r"\(2, 2, 5\), got \(4,\); for one gate per query head, expand k and v to Hq heads",
        ),
        ({"beta": torch.zeros(2, 2, 5).double()}, TypeError, "beta: expected dtype torch.float32"),
        ({"state": torch.zeros(3)}, TypeError, "state: expected a LinearState"),
        ({"state": LinearState(torch.zeros(3))}, ValueError, r"state.S: expected torch.float32 \(2, 2"),
        (
            {"state": LinearState(torch.zeros(2, 2, 8, 8)), "normalize": True}, ValueError,
            "state.z: expected a tensor with normalize=True, got NoneType None",
        ),
        ({"lengths": torch.tensor([5, 6])}, ValueError, "lengths: expected from 0 to L = 5, got .* 6"),
        ({"lengths": torch.tensor([5])}, ValueError, r"lengths: expected shape \(2,\)"),
        ({"lengths": [5, 5]}, TypeError, "lengths: expected an integer tensor"),
        ({"feature_map": "tanh"}, ValueError, "feature_map: expected one of identity, .* got str 'tanh'"),
        ({"feature_map": lambda x: x.sum(-1)}, ValueError, "feature_map: expected a result of shape"),
        ({"impl": "fast"}, ValueError, "impl: expected one of auto, native, torch, reference, got 'fast'"),
        ({"v": Z.double()}, TypeError, "v: expected q's dtype torch.float32"),
    ],
)  # fmt: skip
def test_messages(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"q": X, "k": Z, "v": Z} | options
    with pytest.raises(error, match=message):
        linear_attention(**arguments)


@needs_core
def test_native_rejects_unsupported_calls() -> None:
    with pytest.raises(NotImplementedError, match="two matrix products"):
        linear_attention(X, Z, Z, causal=False, impl="native")
    with pytest.raises(NotImplementedError, match="the tensors are on meta"):
        linear_attention(X.to("meta"), Z.to("meta"), Z.to("meta"), impl="native")
    assert regard.linear_attention(X.to("meta"), Z.to("meta"), Z.to("meta")).is_meta
