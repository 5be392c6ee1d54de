"""Compares LinformerAttention with the `linformer` package and with the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import masks as M
from regard.cache import KVCache
from regard.nn import LinformerAttention, LinformerProjection
from support import HAVE_CORE, assert_close

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
WIDTH, HEADS, LONGEST, RANK = 24, 4, 50, 7


def make(sharing: Any = "heads", **options: Any) -> LinformerAttention:
    heads = HEADS if sharing == "none" else 1
    projection = LinformerProjection(LONGEST, RANK, sharing=sharing, heads=heads)
    return LinformerAttention(WIDTH, HEADS, projection, **options)


def formula(module: LinformerAttention, x: Tensor, lengths: list[int]) -> Tensor:
    """Computes the layer one sample and head at a time."""
    out = []
    E = module.projection.E
    F = E if module.projection.F is None else module.projection.F
    for tokens, n in zip(x, lengths, strict=True):
        q, k, v = (layer(tokens).chunk(HEADS, -1) for layer in (module.query, module.key, module.value))
        heads = []
        for head in range(HEADS):
            projection_head = head if E.shape[0] > 1 else 0
            keys, values = E[projection_head, :n].T @ k[head][:n], F[projection_head, :n].T @ v[head][:n]
            scores = q[head] @ keys.T / (WIDTH // HEADS) ** 0.5
            heads.append(scores.softmax(-1) @ values)
        out.append(module.out(torch.cat(heads, -1)))
    return torch.stack(out)


@pytest.mark.parametrize("share_kv", [False, True])
@pytest.mark.parametrize("L", [LONGEST, 33, 1])
def test_layer_matches_the_package(share_kv: bool, L: int) -> None:
    """With `share_kv` the package also uses the keys as values."""
    package = pytest.importorskip("linformer")
    theirs = package.LinformerSelfAttention(WIDTH, LONGEST, k=RANK, heads=HEADS, share_kv=share_kv)
    ours = make("key-value" if share_kv else "heads", bias=False)
    state = {
        "query.weight": theirs.to_q.weight, "key.weight": theirs.to_k.weight,
        "out.weight": theirs.to_out.weight, "out.bias": theirs.to_out.bias,
        "projection.E": theirs.proj_k[None],
        "value.weight": theirs.to_k.weight if share_kv else theirs.to_v.weight,
    }  # fmt: skip
    ours.load_state_dict(state if share_kv else state | {"projection.F": theirs.proj_v[None]})
    x = torch.randn(2, L, WIDTH, requires_grad=True)
    out, expected = ours(x), theirs(x)
    assert_close(out, expected, rtol=1e-5, atol=1e-5)
    dout = torch.randn(out.shape)
    pairs = [(x, x), (ours.query.weight, theirs.to_q.weight), (ours.projection.E, theirs.proj_k)]
    grads, expected_grads = (
        torch.autograd.grad(result, [pair[side] for pair in pairs], dout)
        for side, result in enumerate((out, expected))
    )
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad.squeeze(0), expected_grad.squeeze(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sharing", ["none", "heads", "key-value"])
def test_layer_matches_the_formula(sharing: str) -> None:
    module = make(sharing).double()
    x = torch.randn(3, 41, WIDTH, dtype=torch.float64, requires_grad=True)
    lengths = [41, 20, 3]
    out, expected = module(x, lengths=torch.tensor(lengths)), formula(module, x, lengths)
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    leaves, dout = [x, *module.parameters()], torch.randn_like(out)
    for grad, expected_grad in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)


def test_padding_matches_a_shorter_sequence() -> None:
    module, x = make().eval(), torch.randn(1, 30, WIDTH)
    expected = module(x[:, :12])
    x[:, 12:] = float("nan")
    assert_close(module(x, lengths=torch.tensor([12]))[:, :12], expected)


def test_context() -> None:
    module, x, context = make().eval(), torch.randn(2, 5, WIDTH), torch.randn(2, 40, WIDTH)
    out = module(torch.cat((x, x), 1), context)
    assert out.shape == (2, 10, WIDTH)
    assert_close(out[:, 5:], module(x, context))


def test_layers_share_one_projection() -> None:
    projection = LinformerProjection(LONGEST, RANK, sharing="key-value")
    layers = torch.nn.ModuleList(LinformerAttention(WIDTH, HEADS, projection) for _ in range(3))
    names = [name for name, _ in layers.named_parameters()]
    assert sum("projection" in name for name in names) == 1
    x = torch.randn(1, 20, WIDTH)
    for layer in layers:
        x = layer(x)
    x.square().sum().backward()
    assert projection.E.grad is not None
    assert projection.E.grad[:, 20:].abs().sum() == 0
    assert projection.E.grad[:, :20].abs().min() > 0


def test_parameter_counts() -> None:
    sizes = {
        sharing: sum(p.numel() for p in make(sharing).projection.parameters())
        for sharing in ("none", "heads", "key-value")
    }
    size = LONGEST * RANK
    assert sizes == {"none": 2 * HEADS * size, "heads": 2 * size, "key-value": size}


def test_dropout_applies_only_in_training() -> None:
    module, x = make(dropout=0.5), torch.randn(1, 30, WIDTH)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize(
    ("name", "value"), [("mask", M.Causal()), ("cache", KVCache(1, HEADS, WIDTH // HEADS, capacity=4))]
)
def test_mask_and_cache_are_rejected(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected None.*every key is a mixture of all tokens"):
        make()(torch.randn(1, 5, WIDTH), **{name: value})


def test_wrong_arguments() -> None:
    module = make()
    with pytest.raises(ValueError, match="at most max_length = 50 tokens, got 51"):
        module(torch.randn(1, 51, WIDTH))
    with pytest.raises(ValueError, match=r"lengths: expected integers \(B = 1,\)"):
        module(torch.randn(1, 5, WIDTH), lengths=torch.tensor([5, 5]))
    for length in (-1, 6):
        with pytest.raises(ValueError, match="lengths: expected from 0 to L = 5"):
            module(torch.randn(1, 5, WIDTH), lengths=torch.tensor([length]))
    q = torch.randn(1, HEADS, 5, 4)
    with pytest.raises(ValueError, match="q, k, v: expected k and v of one length"):
        module.attend(q, q, q[:, :, :4])
    with pytest.raises(ValueError, match="x: expected"):
        module(torch.randn(1, 5, WIDTH + 1))
    with pytest.raises(ValueError, match="sharing: expected one of none, heads, key-value, got 'layers'"):
        LinformerProjection(5, 2, sharing="layers")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heads: expected 1 with sharing='heads', got 4"):
        LinformerProjection(5, 2, heads=4)
    with pytest.raises(ValueError, match="projection: expected heads = 1 or 4, got 3"):
        LinformerAttention(WIDTH, HEADS, LinformerProjection(5, 2, sharing="none", heads=3))
    with pytest.raises(TypeError, match="projection: expected a LinformerProjection, got int 5"):
        LinformerAttention(WIDTH, HEADS, 5)  # type: ignore[arg-type]
