"""Tests of repeated calls: the core runs them without checking them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks as M
from regard._backends.native import repeat as repeated
from regard._call.spec import Spec
from regard._tools.listeners import listeners

pytestmark = pytest.mark.skipif(repeated._repeats is None, reason="no DLPack exchange interface")

SHAPES = {
    "canonical": ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
    "heads": ((4, 3, 8), (2, 5, 8), (2, 5, 8)),
    "textbook": ((3, 8), (5, 8), (5, 8)),
    "two batch dims": ((2, 3, 4, 3, 8), (2, 3, 2, 5, 8), (2, 3, 2, 5, 8)),
    "one batch": ((2, 4, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
    "value size": ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)),
    "no queries": ((2, 4, 0, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
    "no keys": ((2, 4, 3, 8), (2, 2, 0, 8), (2, 2, 0, 8)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"mask": M.Causal()},
    "window": {"mask": M.sliding(2) | ~M.Causal(), "return_lse": True},
    "offset": {"mask": M.Causal(), "offset": 0},
    "numbers": {"scale": 0.3, "softcap": 2.0},
}


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    repeated.forget()
    yield
    repeated.forget()


def tensors(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES[name])
    return q, k, v


def look_up(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, impl: str = "auto", **options: Any) -> Any:
    names = ("offset", "bias", "scale", "softcap", "sink", "dropout", "seed", "return_lse")
    defaults = {"dropout": 0.0, "return_lse": False}
    values = [options.get(name, defaults.get(name)) for name in names]
    return repeated.repeat(q, k, v, mask.lower() if isinstance(mask, M.Mask) else mask, *values, impl)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(map(same, a, b))
    return bool(torch.equal(a, b) and a.stride() == b.stride() and a.dtype is b.dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_repeated_call_gives_the_same_bits(shape: str, option: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(shape, dtype)
    options = OPTIONS[option]
    first = regard.attention(q, k, v, **options)
    assert same(first, look_up(q, k, v, **options))
    assert same(first, regard.attention(q, k, v, **options))


def test_strides_of_a_repeated_call() -> None:
    q, k, v = (x.transpose(1, 2) for x in torch.randn(3, 2, 5, 4, 8))
    first, second = regard.attention(q, k, v), regard.attention(q, k, v)
    assert same(first, second)
    assert second.stride() == q.stride()
    contiguous = regard.attention(q.contiguous(), k, v)
    assert contiguous.is_contiguous()
    assert torch.equal(contiguous, first)


def test_signatures_differ() -> None:
    q, k, v = tensors("canonical")
    calls: list[dict[str, Any]] = [
        {}, {"scale": 0.3}, {"softcap": 0.3}, {"offset": 0}, {"offset": 2}, {"return_lse": True},
        {"mask": M.Causal()}, {"mask": M.sliding(2)}, {"mask": M.Causal(), "offset": 1},
    ]  # fmt: skip
    first = [regard.attention(q, k, v, **options) for options in calls]
    assert all(same(x, regard.attention(q, k, v, **options)) for x, options in zip(first, calls, strict=True))
    exact = [
        regard.attention(*(x.double() for x in (q, k, v)), **options, impl="reference") for options in calls
    ]
    for x, y in zip(first, exact, strict=True):
        torch.testing.assert_close(x, y, check_dtype=False, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": M.Lengths(torch.tensor([3, 5]))},
        {"mask": torch.ones(3, 5, dtype=torch.bool)},
        {"bias": torch.zeros(3, 5)},
        {"sink": torch.zeros(4)},
        {"dropout": 0.5, "seed": 1},
        {"offset": torch.tensor([1, 2])},
        {"scale": 1},
        {"impl": "native"},
    ],
)
def test_other_calls_are_not_remembered(options: dict[str, Any]) -> None:
    q, k, v = tensors("canonical")
    regard.attention(q, k, v)
    assert same(regard.attention(q, k, v, **options), regard.attention(q, k, v, **options))
    assert look_up(q, k, v, **options) is None


def test_gradients_of_a_repeated_call() -> None:
    q, k, v = (x.requires_grad_() for x in tensors("canonical"))
    first = torch.autograd.grad(regard.attention(q, k, v).sum(), (q, k, v))
    assert isinstance(look_up(q, k, v), Spec)
    assert same(first, torch.autograd.grad(regard.attention(q, k, v).sum(), (q, k, v)))
    out, lse = regard.attention(q, k, v, return_lse=True)
    assert same((out, lse), regard.attention(q, k, v, return_lse=True))
    with torch.no_grad():
        assert not regard.attention(q, k, v).requires_grad


def test_autocast_after_a_repeated_call() -> None:
    q, k, v = tensors("canonical")
    for _ in range(2):
        assert regard.attention(q, k, v).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert regard.attention(q, k, v).dtype is torch.bfloat16


def test_negated_views() -> None:
    q, k, v = tensors("canonical")
    expected = regard.attention(-q, k, v)
    negated = torch.complex(torch.zeros_like(q), q).conj().imag
    plain = torch.complex(torch.zeros_like(q), q).imag
    regard.attention(plain, k, v)
    assert negated.is_neg()
    assert torch.equal(regard.attention(negated, k, v), expected)


def test_observers_see_repeated_calls() -> None:
    q, k, v = tensors("canonical")
    for _ in range(2):
        regard.attention(q, k, v)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        regard.attention(q, k, v)
    assert any("attention_forward" in event.key for event in profile.key_averages())
    seen: list[torch.Size] = []
    listeners.append(lambda q, k, options: seen.append(q.shape))
    try:
        regard.attention(q, k, v)
    finally:
        listeners.pop()
    assert seen == [q.shape]
    mapped = torch.func.vmap(lambda x: regard.attention(x, k, v))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(mapped[0], regard.attention(q, k, v))


def test_wrong_arguments_after_a_repeated_call() -> None:
    q, k, v = tensors("canonical")
    regard.attention(q, k, v)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q, k, v.double()), {}, "v: expected q's dtype"),
        ((q, k, v.numpy()), {}, "v: expected a torch.Tensor"),
        ((q, k[..., 1:], v), {}, "k: expected last dim"),
        ((q, k, v), {"mask": "causal"}, "mask: expected"),
        ((q, k, v), {"offset": 2**60}, "offset: expected a position"),
        ((q, k, v), {"offset": 2**70}, "offset: expected a position"),
        ((q, k, v), {"scale": "1"}, "scale: expected"),
        ((q, k, v), {"dropout": None}, "dropout: expected"),
        ((q, k, v), {"return_lse": 1}, "return_lse: expected a bool"),
        ((q, k, v), {"impl": "cuda"}, "impl: expected one of"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            regard.attention(*arguments, **options)


def test_the_memory_of_calls_is_bounded() -> None:
    k = v = torch.randn(1, 1, 2, 4)
    first = regard.attention(k, k, v)
    for i in range(5000):
        regard.attention(k, k, v, offset=i)
    assert look_up(k, k, v) is None
    assert look_up(k, k, v, offset=4999) is not None
    assert same(regard.attention(k, k, v), first)
