"""The torch backend against the reference, for every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks as M, scores
from regard._backends.torch import attention as _torch
from regard._call.make import make
from regard._call.spec import Options
from support import assert_close, rel_l2

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 5, 7, 8, 4
INF = float("inf")


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (B, HQ, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV)
    q, k, v = (torch.randn(size, dtype=dtype) for size in sizes)
    return q, k, v


def document_ids() -> tuple[Tensor, Tensor]:
    return torch.arange(LQ) // 2, torch.arange(LK) // 3


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": M.Causal()},
    "causal from 0": {"mask": M.Causal(), "offset": 0},
    "causal, empty rows": {"mask": M.Causal(), "offset": -2},
    "causal, sees all": {"mask": M.Causal(), "offset": LK},
    "window": {"mask": M.Window(2, 1)},
    "lengths": {"mask": M.Lengths(torch.tensor([0, 4]))},
    "documents": {"mask": M.Documents(*document_ids())},
    "offsets": {"mask": M.Causal() & M.Window(3, 0), "offset": torch.tensor([1, -3])},
    "per head": {"mask": M.PerHead([M.Causal(), M.Window(1, 0), ~M.Causal()] * 2)},
    "combined": {"mask": (M.Window(1, 0) | M.Global([0])) & ~M.Prefix(1)},
    "dense": {"mask": torch.arange(B * LQ * LK).view(B, 1, LQ, LK) % 3 > 0},
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "lse": {"return_lse": True},
    "softcap": {"softcap": 1.2},
    "sink": {"sink": torch.linspace(-1, 1, HQ), "return_lse": True},
    "bias": {"bias": torch.linspace(-2, 2, HQ * LQ * LK).view(1, HQ, LQ, LK).sin()},
    "excluding bias": {"bias": torch.zeros(LQ, LK).index_fill(1, torch.tensor([1]), -INF)},
    "alibi": {"bias": scores.Alibi.standard(HQ)},
    "relative": {"bias": scores.RelativeBias(torch.linspace(-1, 1, 8 * HQ).view(8, HQ))},
    "everything": {
        "bias": scores.Alibi.standard(HQ),
        "softcap": 2.0,
        "sink": torch.ones(HQ),
        "return_lse": True,
    },
}


def actual_and_expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[tuple[Tensor, Tensor]]:
    results = [regard.attention(q, k, v, impl=impl, **options) for impl in ("torch", "reference")]
    pairs = [r if isinstance(r, tuple) else (r,) for r in results]
    return list(zip(*pairs, strict=True))


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_options(mask: str, extra: str) -> None:
    for actual, expected in actual_and_expected(*qkv(), **MASKS[mask], **EXTRAS[extra]):
        assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert actual.dtype is expected.dtype
        assert actual.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extra", ["plain", "lse", "sink", "bias", "alibi"])
def test_dtypes(dtype: torch.dtype, extra: str) -> None:
    for actual, expected in actual_and_expected(*qkv(dtype), mask=M.Causal(), **EXTRAS[extra]):
        assert actual.dtype is expected.dtype
        assert rel_l2(actual, expected) < (1e-6 if dtype is torch.float64 else 2e-2)


CASES = [(batch, extra) for batch in ((), (2, 3)) for extra in ("plain", "sink", "alibi")]


@pytest.mark.parametrize(("batch", "extra"), [(None, "plain"), (None, "lse"), *CASES])
def test_ranks(batch: tuple[int, ...] | None, extra: str) -> None:
    shape = () if batch is None else (*batch, 6)
    q, k, v = torch.randn(*shape, LQ, D), torch.randn(*shape, LK, D), torch.randn(*shape, LK, DV)
    offset = torch.arange(6).view(2, 3) if batch == (2, 3) else None
    for actual, expected in actual_and_expected(q, k, v, mask=M.Causal(), offset=offset, **EXTRAS[extra]):
        assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zero", range(6))
@pytest.mark.parametrize("extra", ["plain", "lse"])
def test_zero_sizes(zero: int, extra: str) -> None:
    b, h, lq, lk, d, dv = (0 if i == zero else n for i, n in enumerate((B, HQ, LQ, LK, D, DV)))
    q, k, v = torch.randn(b, h, lq, d), torch.randn(b, h, lk, d), torch.randn(b, h, lk, dv)
    for actual, expected in actual_and_expected(q, k, v, **EXTRAS[extra]):
        assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_choice_between_sdpa_and_flex() -> None:
    arguments = qkv()
    assert _torch.kernel(make(*arguments, Options(mask=M.Window(2, 0), dropout=0.1))) == "sdpa"
    assert _torch.kernel(make(*arguments, Options(bias=scores.Alibi.standard(HQ)))) == "sdpa"
    for extra in ("lse", "softcap", "sink"):
        assert _torch.kernel(make(*arguments, Options(**EXTRAS[extra]))) == "flex"


def test_sdpa_gets_no_tensor_for_a_causal_mask() -> None:
    arguments = qkv()
    assert not _torch.needs_dense_mask(make(*arguments, Options(mask=M.Causal(), offset=0)))
    assert not _torch.needs_dense_mask(make(*arguments, Options(mask=M.Window(None, 0), offset=LK)))
    assert _torch.needs_dense_mask(make(*arguments, Options(mask=M.Causal())))
    assert _torch.needs_dense_mask(make(*arguments, Options(mask=M.Window(2, 0), offset=0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 1.0, "dropout": 0.5}, "SDPA: .* softcap, FlexAttention: has no dropout"),
        ({"return_lse": True, "dropout": 0.5}, "the LSE, FlexAttention: has no dropout"),
    ],
)
def test_unsupported_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        regard.attention(*qkv(), impl="torch", **options)


def test_flex_has_no_gradients_on_a_cpu() -> None:
    q, k, v = qkv()
    with pytest.raises(
        NotImplementedError, match=r"has no backward on CPU.*possible here: impl=.*'reference'"
    ):
        regard.attention(q.requires_grad_(), k, v, softcap=1.0, impl="torch")


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_sdpa(mask: str) -> None:
    gradients = []
    for impl in ("torch", "reference"):
        torch.manual_seed(1)
        inputs = [*qkv(), torch.randn(1, HQ, LQ, LK)]
        for x in inputs:
            x.requires_grad_()
        q, k, v, bias = inputs
        regard.attention(q, k, v, bias=bias, impl=impl, **MASKS[mask]).square().sum().backward()
        gradients.append([x.grad for x in inputs])
    for actual, expected in zip(*gradients, strict=True):
        assert actual is not None
        assert expected is not None
        assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_dropout_with_a_seed_repeats_and_keeps_the_generator() -> None:
    arguments = qkv()
    state = torch.get_rng_state()
    first, second, other = (
        regard.attention(*arguments, dropout=0.5, seed=s, impl="torch") for s in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_follows_manual_seed() -> None:
    arguments = qkv()
    results = []
    for _ in range(2):
        torch.manual_seed(11)
        results.append([regard.attention(*arguments, dropout=0.5, impl="torch") for _ in range(2)])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "mask", [M.Window(2, 0), M.Prefix(3) | M.Dilated(2), M.longformer((2, 2), [0]), M.Lengths(3)]
)
def test_masks_are_on_the_device_of_the_inputs(mask: M.Mask, bias: bool) -> None:
    """The meta device stands for every device other than the CPU."""
    q, k, v = (torch.empty(2, 4, 7, 8, device="meta") for _ in range(3))
    slopes = scores.Alibi(torch.ones(4, device="meta")) if bias else None
    assert mask.to_dense(7, 7, device="meta").is_meta
    assert regard.attention(q, k, v, mask=mask, bias=slopes, impl="torch").is_meta
