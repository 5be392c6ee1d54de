"""Tests of `attention` and `weights`: signatures, shapes, choice of backend, errors."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import regard
from regard import info, masks as M
from regard._backends import dispatch as _dispatch
from regard._backends.native import core
from regard._call.make import make
from regard._call.spec import Options
from support import assert_close

needs_core = pytest.mark.skipif(core.reason_unavailable() is not None, reason="no compiled core")
IMPLS = ["native", "torch", "reference"]
OPTIONS = ["mask", "offset", "bias", "scale", "softcap", "sink", "dropout", "seed"]


def qkv(*batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*batch, 4, 5, 8), torch.randn(*batch, 2, 7, 8), torch.randn(*batch, 2, 7, 3)


def available(impl: str) -> str:
    if impl == "native" and core.reason_unavailable() is not None:
        pytest.skip(str(core.reason_unavailable()))
    return impl


# Signatures and shapes


def test_signatures() -> None:
    for function, others in ((regard.attention, ["return_lse", "impl"]), (regard.weights, [])):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == ["q", "k", "v", *OPTIONS, *others]
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in [*OPTIONS, *others])


def test_plan_has_the_parameters_of_attention() -> None:
    assert list(inspect.signature(regard.plan).parameters) == list(
        inspect.signature(regard.attention).parameters
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_shapes(impl: str, batch: tuple[int, ...]) -> None:
    q, k, v = qkv(*batch)
    out, lse = regard.attention(q, k, v, mask=M.Causal(), return_lse=True, impl=available(impl))
    assert out.shape == (*batch, 4, 5, 3)
    assert lse.shape == (*batch, 4, 5)
    assert regard.weights(q, k, v).shape == (*batch, 4, 5, 7)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_textbook_form(impl: str) -> None:
    q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    out, lse = regard.attention(q, k, v, return_lse=True, impl=available(impl))
    s = q @ k.T / 8**0.5
    assert_close(out, s.softmax(-1) @ v)
    assert_close(lse, s.logsumexp(-1))
    assert_close(regard.weights(q, k, v), s.softmax(-1))


@pytest.mark.parametrize("impl", IMPLS)
def test_results_do_not_depend_on_the_batch(impl: str) -> None:
    q, k, v = qkv(3)
    out = regard.attention(q, k, v, impl=available(impl))
    alone = regard.attention(q[1], k[1], v[1], impl=impl)
    assert_close(alone, out[1])


def test_weights_refuse_a_large_matrix() -> None:
    q = torch.zeros(1, 1, 1, 4).expand(1, 1, 2**14 + 1, 4)
    with pytest.raises(
        ValueError, match=r"at most 2\*\*28 .* got 268,468,225 of shape \(1, 1, 16385, 16385\)"
    ):
        regard.weights(q, q, q)


def test_weights_keep_the_dtype() -> None:
    q, k, v = (x.bfloat16() for x in qkv(2))
    assert regard.weights(q, k, v).dtype is torch.bfloat16


# Choice of backend


def test_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "reason_unavailable", lambda: None)
    assert _dispatch.choose(make(*qkv(7))) == "native"


def test_auto_without_a_core_takes_torch_then_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "reason_unavailable", lambda: "not built")
    q, k, v = qkv(11)
    assert _dispatch.choose(make(q, k, v)) == "torch"
    assert _dispatch.choose(make(q, k, v, Options(softcap=1.0, dropout=0.5))) == "reference"
    assert regard.plan(q, k, v).against["native"] == ("not built",)


def test_auto_on_other_devices_is_torch() -> None:
    q, k, v = (x.to("meta") for x in qkv(2))
    assert _dispatch.choose(make(q, k, v)) == "torch"


@pytest.mark.parametrize("name", ["torch", "reference", "native"])
def test_a_named_backend_never_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "reason_unavailable", lambda: None)
    table = _dispatch.TABLE["attention"]
    monkeypatch.setitem(table, name, table[name]._replace(reasons=lambda problem: ("it is Sunday",)))
    arguments = torch.randn(3, 5, 8), torch.randn(3, 13, 8), torch.randn(3, 13, 2)
    with pytest.raises(
        NotImplementedError, match=f"impl='{name}' cannot run this call: {name}: it is Sunday; poss"
    ):
        regard.attention(*arguments, impl=name, scale=0.123)


def test_native_without_a_core_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "reason_unavailable", lambda: "the core is not built")
    with pytest.raises(
        NotImplementedError, match="native: the core is not built; possible here: impl='torch'"
    ):
        regard.attention(*qkv(13), impl="native")


def test_backend_choice_depends_on_requires_grad() -> None:
    q, k, v = qkv(2)
    assert regard.attention(q, k, v, softcap=0.7, impl="torch").shape == (2, 4, 5, 3)
    with pytest.raises(NotImplementedError, match="no backward on CPU"):
        regard.attention(q.requires_grad_(), k, v, softcap=0.7, impl="torch")


def test_no_grad_records_no_graph() -> None:
    q, k, v = qkv(2)
    with torch.no_grad():
        assert not regard.attention(q.requires_grad_(), k, v, impl=available("native")).requires_grad


@pytest.mark.parametrize("impl", ["native", "torch", "reference"])
def test_gradients_flow(impl: str) -> None:
    q, k, v = qkv(2)
    want = torch.autograd.grad(attention_by_hand(q.requires_grad_(), k, v).square().sum(), q)
    got = torch.autograd.grad(regard.attention(q, k, v, impl=available(impl)).square().sum(), q)
    assert_close(got[0], want[0])


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )


def test_environment_variable_sets_the_backend() -> None:
    code = "import torch, regard; q = torch.zeros(3, 4); print(regard.plan(q, q, q).impl)"
    assert run_python(code, REGARD_IMPL="reference").stdout.strip() == "reference"
    wrong = run_python(code, REGARD_IMPL="gpu").stderr
    assert "environment variable REGARD_IMPL: expected one of native, torch, reference, got 'gpu'" in wrong


# python -m regard.info


def test_info_reports_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main() == 0
    text = capsys.readouterr().out
    for name in ("regard", "torch", "native core", "auto means", "self-test reference"):
        assert name in text
    assert "WRONG" not in text


def test_info_fails_when_a_backend_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = _dispatch.TABLE["attention"]
    zeros = table["torch"]._replace(run=lambda problem: (torch.zeros(problem.spec.out_shape), None))
    monkeypatch.setitem(table, "torch", zeros)
    assert info.main() == 1
    assert "WRONG" in capsys.readouterr().out


def test_negated_view_after_an_ordinary_tensor() -> None:
    """A lazily negated view has the same Spec as its base, but its values are those of -q."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    for options in ({}, {"mask": M.Causal()}):
        regard.attention(q, k, v, **options)
        assert_close(
            regard.attention(torch._neg_view(q), k, v, **options), regard.attention(-q, k, v, **options)
        )


def test_fake_tensors_give_shapes() -> None:
    with FakeTensorMode():
        q = torch.randn(2, 4, 5, 8)
        k = torch.randn(2, 2, 7, 8)
        out, lse = regard.attention(q, k, k[..., :3], mask=M.Causal(), return_lse=True)
    assert isinstance(out, FakeTensor)
    assert isinstance(lse, FakeTensor)
    assert (out.shape, lse.shape) == ((2, 4, 5, 3), (2, 4, 5))
    assert regard.attention(q, q, q).shape == q.shape


@needs_core
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # raised by PyTorch
def test_forward_mode_is_not_detached() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        got, want = (
            forward_ad.unpack_dual(regard.attention(dual, k, v, impl=impl)).tangent
            for impl in ("native", "reference")
        )
    assert_close(got, want)


def test_bool_masks_of_any_rank_are_not_copied() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    keep = torch.tensor([True, False, True, True, False])
    assert_close(regard.attention(q, k, v, mask=keep), regard.attention(q, k, v, mask=keep.expand(5, 5)))
    assert_close(regard.attention(q, k, v, mask=torch.tensor(True)), regard.attention(q, k, v))
    square = torch.rand(5, 5) < 0.5
    assert make(q, k, v, Options(mask=square)).tensors[0].data_ptr() == square.data_ptr()


@needs_core
@pytest.mark.parametrize("step", [2**31 - 1, 2**31, 2**54, 2**61])
def test_dilation_far_beyond_the_keys(step: int) -> None:
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 4096)[..., :8], torch.randn(1, 2, 7, 8)
    for mask in (M.Dilated(step), M.Dilated(step) & M.Dilated(step - 2)):
        assert_close(
            regard.attention(q, k, v, mask=mask), regard.attention(q, k, v, mask=mask, impl="reference")
        )
