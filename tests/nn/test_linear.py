"""Tests of nn.LinearAttention and of LinearCache, whose state has constant size."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard import linear_attention
from regard.cache import LinearCache
from regard.nn import Block, FeedForward, LinearAttention, Stack
from support import assert_close

VARIANTS: dict[str, dict[str, Any]] = {
    "classic": {},
    "grouped": {"kv_heads": 2, "value_dim": 5},
    "retention": {"decay": "head", "normalize": False, "feature_map": "identity", "out_norm": nn.RMSNorm},
    "gated": {"decay": "token", "gate": True, "bias": True},
    "delta": {"delta": True, "out_norm": nn.RMSNorm},
    "gated delta": {"delta": True, "decay": "token", "kv_heads": 2, "gate": True},
    "softmax features": {"feature_map": "softmax", "head_dim": 7},
}


def layer(name: str, **options: Any) -> LinearAttention:
    return LinearAttention(24, 4, **VARIANTS[name] | options)


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_matches_one_call(name: str) -> None:
    module, x = layer(name).eval(), torch.randn(2, 50, 24)
    with torch.no_grad():
        expected = module(x)
        cache = module.new_cache(2)
        steps = [module(chunk, cache=cache) for chunk in x.split((40, 1, 1, 1, 7), 1)]
    assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-5)
    assert len(cache) == 50
    assert cache.nbytes == module.new_cache(2).nbytes


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    module = layer(name)
    module(torch.randn(2, 9, 24)).square().sum().backward()
    for parameter, p in module.named_parameters():
        assert p.grad is not None, parameter
        assert p.grad.any(), parameter


@pytest.mark.parametrize("name", VARIANTS)
def test_padding(name: str) -> None:
    module, x = layer(name).eval(), torch.randn(2, 20, 24)
    with torch.no_grad():
        padded = module(x, lengths=torch.tensor([20, 6]))
        assert_close(padded[1, :6], module(x[1, :6]), rtol=1e-4, atol=1e-5)
        cache = module.new_cache(2)
        module(x, lengths=torch.tensor([20, 6]), cache=cache)
        step = module(x[:, :1], cache=cache)
        assert_close(step[1], module(torch.cat([x[1, :6], x[1, :1]]))[-1:], rtol=1e-4, atol=1e-5)
    assert cache.lengths.tolist() == [21, 7]


def test_gated_delta_layer_matches_its_formula() -> None:
    module, x = layer("gated delta"), torch.randn(1, 10, 24)
    q, k, v = module.qkv(x).split((24, 12, 12), -1)
    q, k, v = (t.unflatten(-1, (-1, 6)).transpose(1, 2) for t in (q, k, v))
    gates = F.logsigmoid(module.token_decay(x)).mT, module.beta(x).sigmoid().mT
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    heads = linear_attention(q, k, v, log_decay=gates[0], beta=gates[1], impl="reference")
    joined = heads.transpose(1, 2).flatten(-2) * module.gate(x).sigmoid()
    assert_close(module(x), module.out(joined))


def test_retention_is_initialised_as_in_retnet() -> None:
    decay = layer("retention").head_decay.sigmoid()
    assert_close(decay, 1 - 2.0 ** (-5 - torch.arange(4.0)))


def test_non_causal_layer_is_permutation_equivariant() -> None:
    module, x = LinearAttention(24, 4, causal=False).eval(), torch.randn(2, 12, 24)
    order = torch.randperm(12)
    assert_close(module(x)[:, order], module(x[:, order]), atol=1e-5)


def test_input_without_batch_dim() -> None:
    module, x = layer("classic"), torch.randn(9, 24)
    assert_close(module(x), module(x[None])[0])


def test_copies_and_checkpoints() -> None:
    module, x = layer("gated delta"), torch.randn(1, 9, 24)
    for restored in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(restored(x), module(x))
    with pytest.raises(RuntimeError, match="nothing was loaded"):
        module.load_state_dict(layer("delta").state_dict())


def filled_cache(**options: Any) -> tuple[LinearCache, Tensor]:
    cache, x = LinearCache(3, 2, 4, normalize=True, **options), torch.rand(3, 2, 6, 4)
    cache.attend(x, x, x)
    return cache, x


def test_forks_are_independent() -> None:
    cache, x = filled_cache()
    fork = cache.fork()
    first = cache.attend(x, x, x)
    assert torch.equal(fork.attend(x, x, x), first)
    assert len(fork) == len(cache) == 12


def test_reorder_reset_and_state_dict() -> None:
    cache, x = filled_cache()
    expected = cache.fork().attend(x, x, x)
    saved = cache.state_dict()
    cache.reorder([2, 0])
    assert torch.equal(cache.attend(x[[2, 0]], x[[2, 0]], x[[2, 0]]), expected[[2, 0]])
    restored, _ = filled_cache()
    restored.reset()
    assert len(restored) == 0
    assert not restored.state.S.any()
    restored.load_state_dict(saved)
    assert torch.equal(restored.attend(x, x, x), expected)
    assert repr(restored).startswith("LinearCache(B=3, Hkv=2, D=4, Dv=4, lengths=12")
    assert restored.positions(2).tolist() == [[12, 13]] * 3


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpointed_activations(name: str) -> None:
    module, x = layer(name), torch.randn(2, 40, 24, requires_grad=True)
    expected_grads = torch.autograd.grad(module(x).square().sum(), x)
    grads = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(grads[0], expected_grads[0])


def test_decoding_in_a_stack() -> None:
    stack = Stack([Block(layer("gated"), FeedForward(24)) for _ in range(2)]).eval()
    x = torch.randn(2, 9, 24)
    with torch.no_grad():
        caches = stack.new_caches(2, capacity=9)
        steps = [stack(chunk, caches=caches) for chunk in x.split((5, 1, 3), 1)]
        assert_close(torch.cat(steps, 1), stack(x), rtol=1e-4, atol=1e-5)


def test_a_call_that_raises_changes_nothing() -> None:
    cache, x = filled_cache()
    before = cache.state
    for gate in ("log_decay", "beta"):
        with pytest.raises(RuntimeError, match=f"{gate}: expected requires_grad=False"):
            cache.attend(x, x, x, **{gate: torch.zeros(2, requires_grad=True)})
    with pytest.raises(ValueError, match="beta"):
        cache.attend(x, x, x, beta=0.5)
    with pytest.raises(RuntimeError, match="v: expected requires_grad=False"):
        cache.attend(x, x, x.clone().requires_grad_())
    assert cache.state is before
    assert len(cache) == 6


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: filled_cache()[0].crop(3), NotImplementedError, "cannot drop any"),
        (lambda: filled_cache()[0].reorder([3]), ValueError, "index: expected samples from 0 to 2"),
        (lambda: filled_cache()[0].load_state_dict({}), ValueError, "state: expected the tensors"),
        (lambda: LinearCache(1, 1, 4, dtype=torch.int32), TypeError, "dtype: expected float64"),
        (lambda: LinearCache(1, 1, 4, normalize=1), TypeError, "normalize: expected a bool, got int 1"),
        (lambda: LinearCache(1, 1, 4).positions(-1), ValueError, "L: expected an integer from 0"),
        (
            lambda: LinearCache(2, 1, 4).attend(*(torch.ones(n, 1, 3, 4) for n in (1, 2, 2))),
            ValueError,
            re.escape("q: expected shape (2, 1, 3, 4)"),
        ),
        (lambda: layer("classic").new_cache(1, 0), ValueError, "capacity: expected an integer from 1"),
        (lambda: layer("classic", decay="fast"), ValueError, "decay: expected None, 'head' or 'token'"),
        (lambda: layer("delta", normalize=True), ValueError, "normalize: expected False with delta"),
        (lambda: layer("delta", causal=False), ValueError, "causal: expected True with decay or delta"),
        (lambda: layer("classic", kv_heads=3), ValueError, "kv_heads: expected a divisor of heads = 4"),
        (lambda: layer("classic", feature_map="sin"), ValueError, "feature_map: expected one of"),
        (lambda: layer("classic")(torch.zeros(2, 3)), ValueError, "x: expected"),
        (
            lambda: layer("classic", causal=False)(
                torch.zeros(1, 2, 24), cache=layer("classic").new_cache(1)
            ),
            ValueError,
            "cache: expected None with causal=False",
        ),
        (
            lambda: layer("delta")(torch.zeros(1, 2, 24), cache=layer("classic").new_cache(1)),
            ValueError,
            "cache: expected a LinearCache with normalize=False",
        ),
    ],
)
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
