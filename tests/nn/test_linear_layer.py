"""regard.nn.Linear, and the linear layers of the other modules."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

import regard
from regard._api import projection
from regard.nn import Linear
from support import HAVE_CORE, assert_close

needs_core = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
D, WIDTH = 24, 40


def pair(**options: Any) -> tuple[Linear, nn.Linear]:
    """Returns a layer of Regard and one of PyTorch with the same parameters."""
    ours, theirs = Linear(D, WIDTH, **options), nn.Linear(D, WIDTH, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def native_calls(function: Any) -> int:
    """Counts how many linear layers the core computes while `function` runs."""
    with patch.object(projection, "project", wraps=projection.project) as project:
        function()
    return int(project.call_count)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(D,), (1, D), (2, 3, D), (40, D), (0, D), (2, 0, D)])
@pytest.mark.parametrize("grad", [True, False])
def test_results_are_pytorchs(shape: tuple[int, ...], bias: bool, grad: bool) -> None:
    ours, theirs = pair(bias=bias)
    x = torch.randn(shape)
    with torch.set_grad_enabled(grad):
        out, expected = ours(x), theirs(x)
    assert out.shape == expected.shape
    assert out.requires_grad == expected.requires_grad
    assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_pytorchs() -> None:
    ours, theirs = pair()
    x = torch.randn(2, D)
    for layer in (ours, theirs):
        layer(x).square().sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    x.requires_grad_()
    ours.requires_grad_(False)
    assert ours(x).requires_grad


@needs_core
@pytest.mark.parametrize(("dtype", "depth", "most"), [
    (torch.float32, 2000, 32), (torch.float64, D, 32), (torch.bfloat16, 1024, 8), (torch.bfloat16, 1025, 4),
    (torch.float16, 2000, 32),
])  # fmt: skip
def test_the_core_computes_few_rows_without_gradients(dtype: torch.dtype, depth: int, most: int) -> None:
    layer, x = Linear(depth, WIDTH, dtype=dtype), torch.randn(most + 1, depth, dtype=dtype)
    assert native_calls(lambda: layer(x[1:])) == 0
    with torch.no_grad():
        assert native_calls(lambda: layer(x[1:])) == native_calls(lambda: layer(x[:1])) == 1
        assert native_calls(lambda: layer(x)) == 0
    assert native_calls(lambda: layer.requires_grad_(False)(x[1:])) == 1


@pytest.mark.parametrize("arguments", [
    (torch.randn(2, D + 1),), (torch.randn(2, D, dtype=torch.float64),), (torch.tensor(1.0),), ("x",), (),
])  # fmt: skip
def test_errors_are_pytorchs(arguments: tuple[Any, ...]) -> None:
    ours, theirs = pair()
    with torch.no_grad():
        with pytest.raises((RuntimeError, TypeError)) as expected:
            theirs(*arguments)
        with pytest.raises(type(expected.value)):
            ours(*arguments)


@pytest.mark.parametrize("grad", [True, False])
def test_wrong_width_names_the_argument(grad: bool) -> None:
    message = re.escape("input: expected (..., 24), got float32 tensor of shape (2, 25)")
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=message):
        Linear(D, WIDTH)(torch.randn(2, D + 1))


def test_state_dict_and_copies() -> None:
    ours, theirs = pair()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(copy.deepcopy(ours).state_dict())
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, nn.Linear)


def test_hooks_run() -> None:
    ours, theirs = pair()
    for layer in (ours, theirs):
        layer.register_forward_pre_hook(lambda m, args: (2 * args[0],))
        layer.register_forward_hook(lambda m, args, out: out + 1)
    with torch.no_grad():
        x = torch.randn(1, D)
        assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@needs_core
def test_changed_weights_are_used() -> None:
    """Pruned, normalised and parametrised weights, tied weights and replaced data."""
    x = torch.randn(1, D)
    with torch.no_grad():
        layer = Linear(D, WIDTH)
        prune.l1_unstructured(layer, "weight", 0.5)
        assert_close(layer(x), F.linear(x, layer.weight_orig * layer.weight_mask, layer.bias))  # type: ignore[operator]
        layer = weight_norm(Linear(D, WIDTH))
        assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        layer = Linear(D, WIDTH)
        parametrize.register_parametrization(layer, "weight", Doubled())
        original = layer.parametrizations.weight.original  # type: ignore[union-attr]
        assert_close(layer(x), F.linear(x, 2 * original, layer.bias))
        layer, embedding = Linear(D, WIDTH), nn.Embedding(WIDTH, D)
        layer.weight = embedding.weight
        embedding.weight.mul_(3)
        assert_close(layer(x), F.linear(x, embedding.weight, layer.bias))
        layer.weight.data = torch.ones(WIDTH, D)
        assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_autocast_is_pytorchs() -> None:
    ours, theirs = pair()
    x = torch.randn(1, D)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, expected = ours(x), theirs(x)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # from torch.func.jvp
def test_compile_export_and_transforms() -> None:
    layer, x = Linear(D, WIDTH).requires_grad_(False), torch.randn(3, D)
    expected = F.linear(x, layer.weight, layer.bias)
    assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
    assert_close(torch.export.export(layer, (x,)).module()(x), expected)
    assert_close(torch.func.vmap(layer)(x), expected)
    tangents = torch.func.jvp(layer, (x,), (x,))[1]
    assert_close(tangents, F.linear(x, layer.weight))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x, x))
        assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangents)


def test_negated_views() -> None:
    layer = Linear(D, WIDTH).requires_grad_(False)
    x = torch.randn(1, D, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


@needs_core
@pytest.mark.parametrize("make", [
    lambda: (regard.nn.Attention(D, 2), 2),
    lambda: (regard.nn.Attention(D, 2, kv_model=D), 3),
    lambda: (regard.nn.LatentAttention(D, 2, rank=8, nope_dim=8, rope_dim=4), 3),
    lambda: (regard.nn.LinearAttention(D, 2), 2),
    lambda: (regard.nn.FeedForward(D), 2),
    lambda: (regard.nn.SwiGLU(D), 2),
])  # fmt: skip
def test_modules_use_the_core(make: Any) -> None:
    module, least = make()
    x = torch.randn(1, 2, D)
    context = (x,) if getattr(module, "kv_model", None) else ()
    with torch.no_grad():
        assert native_calls(lambda: module(x, *context)) >= least


@needs_core
def test_multihead_attention_uses_the_core() -> None:
    ours = regard.nn.MultiheadAttention(D, 2, batch_first=True).eval()
    theirs = nn.MultiheadAttention(D, 2, batch_first=True).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 3, D)
    with torch.no_grad():
        assert native_calls(lambda: ours(x, x, x)) == 2
        assert_close(ours(x, x, x)[0], theirs(x, x, x)[0], rtol=1e-5, atol=1e-6)
