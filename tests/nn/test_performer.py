"""Tests of Performer: random features, the estimate, and agreement with `performer-pytorch`."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from regard import features
from regard.nn import PerformerAttention
from support import HAVE_CORE, assert_close, rel_l2

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
B, HEADS, D, WIDTH = 2, 3, 8, 24


def random_projection(m: int, dim: int = D, seed: int = 0) -> Tensor:
    return features.orthogonal_gaussian(
        m, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def qkv(L: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, B, HEADS, L, D, dtype=dtype)
    return size * q, size * k, v


# Features


@pytest.mark.parametrize("m", [3, 8, 20])
def test_rows_are_orthogonal_in_groups(m: int) -> None:
    w = random_projection(m)
    assert w.shape == (m, D)
    for group in w.split(D):
        products = group @ group.T
        assert_close(products, products.diagonal().diag(), atol=1e-12)
    assert torch.equal(w, random_projection(m))
    assert not torch.equal(w, random_projection(m, seed=1))


def test_rows_are_distributed_as_gaussian_vectors() -> None:
    w = torch.cat([random_projection(D, seed=seed) for seed in range(2000)])
    assert_close(w.mean(0), torch.zeros(D), atol=0.03)
    assert_close(w.T @ w / len(w), torch.eye(D), atol=0.05)
    assert abs(float(w.square().sum(1).var()) - 2 * D) < 1  # chi squared


@pytest.mark.parametrize("m", [4, 64])
def test_the_estimate_of_the_kernel_is_unbiased(m: int) -> None:
    """The mean over 200 draws is within 3 standard errors of exp(q.k).

    The variance grows as exp(|q + k|^2), so q and k are small enough for 200 draws to estimate it.
    """
    q, k = 0.25 * torch.randn(2, 20, D, dtype=torch.float64)
    draws = torch.stack([
        (features.positive_features(q, w) * features.positive_features(k, w)).sum(-1)
        for w in (random_projection(m, seed=seed) for seed in range(200))
    ])  # fmt: skip
    exact = (q * k).sum(-1).exp()
    errors = (draws.mean(0) - exact) / (draws.std(0) / len(draws) ** 0.5)
    assert errors.abs().max() < 3
    assert errors.abs().max() > 0.1  # and not because the standard error is huge
    assert (draws > 0).all()


def test_features_use_the_scale_of_the_scores() -> None:
    q, w = torch.randn(5, D, dtype=torch.float64), random_projection(16)
    phi = features.positive_features(q, w, scale=0.25)
    assert_close(phi, features.positive_features(0.5 * q, w))
    assert_close(features.positive_exponents(q, w, scale=0.25), phi.log())


def test_generalized_features() -> None:
    q, w = torch.randn(5, D, dtype=torch.float64), random_projection(16)
    assert_close(features.generalized_features(q, w), (q @ w.T).relu())
    assert_close(features.generalized_features(q, w, torch.exp, scale=0.25), (0.5 * q @ w.T).exp())
    with pytest.raises(ValueError, match=r"projection: expected \(m, D = 8\)"):
        features.generalized_features(q, w[:, :3])


# The module compared with performer-pytorch


@functools.cache
def package() -> Any:
    pytest.importorskip("performer_pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from performer_pytorch import performer_pytorch
    return performer_pytorch


def their_attention(ours: PerformerAttention, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Returns the package's attention with our projection.

    Its epsilons are set to 0, because they are relative to other quantities than ours.
    """
    module = package()
    monkeypatch.setattr(module, "softmax_kernel", functools.partial(module.softmax_kernel, eps=0))
    generalized = ours.kernel != "softmax"
    attend = module.FastAttention(
        D, ours.features, causal=ours.causal, generalized_attention=generalized, kernel_fn=torch.relu
    )
    attend.projection_matrix.copy_(ours.projection)
    if ours.causal:
        attend.causal_linear_fn = functools.partial(module.causal_linear_attention_noncuda, eps=0)
    capsys.readouterr()
    return attend


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", torch.relu])
def test_attention_matches_the_package(
    causal: bool, kernel: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    eps = 0.0 if kernel == "softmax" else None
    ours = PerformerAttention(WIDTH, HEADS, features=40, kernel=kernel, causal=causal, eps=eps)
    attend = their_attention(ours, monkeypatch, capsys)
    tensors = [x.requires_grad_() for x in qkv(256)]
    out, expected = ours.attend(*tensors), attend(*tensors)
    assert_close(out, expected, rtol=1e-5, atol=1e-5)
    dout = torch.randn(out.shape)
    pairs = zip(*(torch.autograd.grad(y, tensors, dout) for y in (out, expected)), strict=True)
    for grad, expected_grad in pairs:
        assert rel_l2(grad, expected_grad) < 1e-5


# The estimate


def exact_estimate(module: PerformerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes the estimate over all pairs, without stabilisation or epsilon."""
    w, scale = module.projection.double(), D**-0.5
    phi_q, phi_k = (features.positive_features(x.double(), w, scale=scale) for x in (q, k))
    pairs = phi_q @ phi_k.mT
    if module.causal:
        pairs = pairs.tril()
    return pairs @ v.double() / pairs.sum(-1, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
def test_stabilisation_cancels(causal: bool) -> None:
    module = PerformerAttention(WIDTH, HEADS, features=40, causal=causal, eps=0.0, seed=3)
    tensors = qkv(70)
    assert_close(module.attend(*tensors), exact_estimate(module, *tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_large_queries_and_keys_stay_finite(causal: bool) -> None:
    """The norms make exp(w.k - |k|^2 / 2) as small as exp(-800)."""
    module = PerformerAttention(WIDTH, HEADS, features=40, causal=causal, seed=3)
    q, k, v = (x.requires_grad_() for x in qkv(70, size=25.0))
    out = module.attend(q, k, v)
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() * (1 + 1e-5)  # a mean of values
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


def mean_error(m: int, tensors: tuple[Tensor, Tensor, Tensor]) -> float:
    """Returns the error averaged over 12 draws of the features."""
    errors = torch.tensor([
        regard.compare_to_exact(
            PerformerAttention(WIDTH, HEADS, features=m, seed=seed), *tensors, weights=False
        ).error
        for seed in range(12)
    ])  # fmt: skip
    return float(errors.mean())


def test_the_error_falls_as_features_grow() -> None:
    tensors = qkv(64, size=0.7)
    errors = [mean_error(m, tensors) for m in (8, 32, 128, 512)]
    for error, next_error in itertools.pairwise(errors):
        assert next_error < error
    assert errors[-1] < errors[0] / 3


def test_later_tokens_change_nothing() -> None:
    """Later tokens change nothing, not even through the factor that keeps features in range."""
    module = PerformerAttention(WIDTH, HEADS, features=16, causal=True, seed=1).eval()
    x = torch.randn(1, 50, WIDTH)
    before = module(x)
    x[:, 30:] *= 40
    assert_close(module(x)[:, :30], before[:, :30])
    assert not torch.allclose(module(x)[:, 30:], before[:, 30:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", torch.relu])
def test_padding_matches_a_shorter_sequence(causal: bool, kernel: Any) -> None:
    module = PerformerAttention(WIDTH, HEADS, features=16, kernel=kernel, causal=causal, seed=1).eval()
    x = torch.randn(3, 40, WIDTH)
    x[1, 13:] = float("nan")
    out = module(x, lengths=torch.tensor([40, 13, 0]))
    assert_close(out[1, :13], module(x[1:2, :13])[0])
    assert_close(out[0], module(x[:1])[0])
    assert out[2].isfinite().all()


@pytest.mark.parametrize("kernel", ["softmax", torch.relu])
@pytest.mark.parametrize("lengths", [None, torch.tensor([50, 12])])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_match_one_chunk(
    kernel: Any, causal: bool, lengths: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 7 tokens match one chunk. A chunk may contain only padding."""
    module = PerformerAttention(WIDTH, HEADS, features=16, kernel=kernel, causal=causal, seed=1)
    tensors = [x.requires_grad_() for x in qkv(50, size=3.0, dtype=torch.float64)]
    dout = torch.randn_like(tensors[0])
    one_chunk = module.attend(*tensors, lengths=lengths)
    monkeypatch.setattr("regard.nn.performer.CHUNK", 7)
    chunked = module.attend(*tensors, lengths=lengths)
    assert_close(chunked, one_chunk, rtol=1e-10, atol=1e-10)
    pairs = zip(*(torch.autograd.grad(y, tensors, dout) for y in (chunked, one_chunk)), strict=True)
    for grad, expected_grad in pairs:
        assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_no_tokens(causal: bool) -> None:
    module = PerformerAttention(WIDTH, HEADS, causal=causal)
    assert module(torch.randn(2, 0, WIDTH)).shape == (2, 0, WIDTH)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal: bool) -> None:
    module = PerformerAttention(6, 2, features=5, causal=causal, seed=1, redraw=None).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))


def test_bfloat16() -> None:
    module = PerformerAttention(WIDTH, HEADS, features=64, seed=1)
    tensors = qkv(50)
    out = module.attend(*(x.bfloat16() for x in tensors))
    assert out.dtype == torch.bfloat16
    assert rel_l2(out, module.attend(*(x.bfloat16().float() for x in tensors))) < 0.01


# The schedule


def test_a_seed_gives_the_same_features() -> None:
    first_module, same_seed, other_seed = (PerformerAttention(WIDTH, HEADS, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(first_module.projection, same_seed.projection)
    assert not torch.equal(first_module.projection, other_seed.projection)
    torch.manual_seed(9)
    first = PerformerAttention(WIDTH, HEADS).projection
    torch.manual_seed(9)
    assert torch.equal(first, PerformerAttention(WIDTH, HEADS).projection)


def test_features_are_redrawn_only_in_training() -> None:
    module, x = PerformerAttention(WIDTH, HEADS, seed=4, redraw=3), torch.randn(1, 5, WIDTH)
    projections = []
    for _ in range(7):
        module(x)
        projections.append(module.projection.clone())
    changes = [not torch.equal(a, b) for a, b in itertools.pairwise(projections)]
    assert changes == [False, False, True, False, False, True]
    module.eval()
    for _ in range(5):
        module(x)
    assert torch.equal(module.projection, projections[-1])
    fixed = PerformerAttention(WIDTH, HEADS, seed=4, redraw=None)
    for _ in range(5):
        fixed(x)
    assert torch.equal(fixed.projection, projections[0])


def test_a_checkpoint_continues_the_schedule() -> None:
    module, x = PerformerAttention(WIDTH, HEADS, seed=4, redraw=2), torch.randn(1, 5, WIDTH)
    for _ in range(3):
        module(x)
    copied = PerformerAttention(WIDTH, HEADS, seed=77, redraw=2)
    copied.load_state_dict(copy.deepcopy(module.state_dict()))
    for _ in range(4):
        assert torch.equal(module(x), copied(x))
    module.redraw()
    assert not torch.equal(module.projection, copied.projection)


def test_training_lowers_the_loss() -> None:
    module = PerformerAttention(WIDTH, HEADS, features=16, causal=True, seed=0)
    x, target = torch.randn(2, 32, WIDTH), torch.randn(2, 32, WIDTH)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"features": 0}, ValueError, "features: expected an integer from 1"),
        ({"redraw": 0}, ValueError, "redraw: expected an integer from 1"),
        ({"kernel": "relu"}, TypeError, "kernel: expected 'softmax' or a function"),
        ({"eps": -1.0}, ValueError, "eps: expected a number of at least 0"),
        ({"seed": 1.5}, TypeError, "seed: expected an int"),
        ({"eps": "small"}, TypeError, "eps: expected a number, got str 'small'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PerformerAttention(WIDTH, HEADS, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_wrong_calls(causal: bool) -> None:
    module, x = PerformerAttention(WIDTH, HEADS, causal=causal, seed=2**60), torch.randn(2, 5, WIDTH)
    for length in (-1, 6):
        with pytest.raises(ValueError, match="lengths: expected from 0 to L = 5"):
            module(x, lengths=torch.tensor([5, length]))
    q, k = torch.randn(1, HEADS, 3000, D), torch.randn(1, HEADS, 1024, D)
    if causal:  # queries after the last key must not be dropped silently
        with pytest.raises(ValueError, match="expected q, k and v of one length"):
            module.attend(q, k, k)
    with pytest.raises(ValueError, match=r"q, k, v: expected .*k and v of one length"):
        module.attend(k, k, k[:, :, 1:])


def test_wrong_features() -> None:
    w = random_projection(4)
    with pytest.raises(ValueError, match="scale: expected a number above 0, got -1"):
        features.positive_features(torch.randn(3, D), w, scale=-1.0)
    with pytest.raises(TypeError, match="x: expected a float tensor"):
        features.positive_features(torch.ones(3, D, dtype=torch.long), w)
    with pytest.raises(TypeError, match="kernel: expected a function of a tensor, got str 'relu'"):
        features.generalized_features(torch.randn(3, D), w, "relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
def test_checkpointed_activations(causal: bool) -> None:
    module, x = PerformerAttention(WIDTH, HEADS, causal=causal, redraw=None, seed=0), torch.randn(2, 9, WIDTH)
    x.requires_grad_()
    (expected_grad,) = torch.autograd.grad(module(x).square().sum(), x)
    (grad,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(grad, expected_grad)


def test_repr() -> None:
    text = repr(PerformerAttention(WIDTH, HEADS, kernel=torch.relu, seed=5))
    assert "features=16, kernel=relu, causal=False, redraw=1000, seed=5, eps=0.001" in text
