"""Tests of `merge`: partial results over disjoint keys give the result over all keys."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import regard
from regard import masks as M
from support import assert_close, rel_l2

B, H, Hkv, Lq, Lk, D, Dv = 2, 6, 3, 5, 23, 11, 7


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(B, H, Lq, D, dtype=dtype)
    return q, torch.randn(B, Hkv, Lk, D, dtype=dtype), torch.randn(B, Hkv, Lk, Dv, dtype=dtype)


def partials(q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns outs and LSEs of causal attention over each key range between two `bounds`."""
    results = [
        regard.attention(
            q, k[..., a:b, :], v[..., a:b, :], mask=M.Causal(), offset=Lk - Lq - a, return_lse=True
        )
        for a, b in pairwise(bounds)
    ]
    return [out for out, _ in results], [lse for _, lse in results]


@given(st.lists(st.integers(0, Lk), max_size=5))
def test_any_split_of_the_keys(cuts: list[int]) -> None:
    q, k, v = tensors()
    out, lse = regard.merge(*partials(q, k, v, [0, *sorted(cuts), Lk]))
    expected, expected_lse = regard.attention(q, k, v, mask=M.Causal(), return_lse=True)
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)],
)
def test_dtypes(dtype: torch.dtype, limit: float) -> None:
    q, k, v = tensors(dtype)
    out, lse = regard.merge(*partials(q, k, v, [0, 4, 20, Lk]))
    assert out.dtype is dtype
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    exact = regard.attention(q.double(), k.double(), v.double(), mask=M.Causal())
    assert rel_l2(out, exact) < limit


def test_stacked_tensors_are_the_same_as_lists() -> None:
    outs, lses = partials(*tensors(), [0, 9, Lk])
    for a, b in zip(
        regard.merge(outs, lses), regard.merge(torch.stack(outs), torch.stack(lses)), strict=True
    ):
        assert torch.equal(a, b)


def test_one_partial_result_is_the_result() -> None:
    outs, lses = partials(*tensors(), [0, Lk])
    out, lse = regard.merge(outs, lses)
    assert_close(out, outs[0])
    assert_close(lse, lses[0])


def test_large_scores_do_not_overflow() -> None:
    outs = torch.randn(3, 4, 2)
    lses = torch.tensor([[1e4], [-1e4], [1e4]]).expand(3, 4)
    out, lse = regard.merge(outs, lses)
    assert_close(out, (outs[0] + outs[2]) / 2)
    assert_close(lse, torch.full((4,), 1e4 + math.log(2)), rtol=1e-7)


def test_fully_masked_rows() -> None:
    """Row 0 has no keys in either partial result, row 1 only in the second.

    An output whose LSE is -inf is not read, so it may be NaN.
    """
    outs = torch.randn(2, 3, 4)
    outs[:, 0] = outs[0, 1] = torch.nan
    lses = torch.tensor([[-torch.inf, -torch.inf, 0.5], [-torch.inf, 2.0, 1.0]])
    outs.requires_grad_()
    lses.requires_grad_()
    out, lse = regard.merge(outs, lses)
    assert torch.equal(out[0], torch.zeros(4))
    assert_close(out[1], outs[1, 1])
    assert lse.tolist()[:2] == [-torch.inf, 2.0]
    (out.sum() + lse[1:].sum()).backward()
    assert outs.grad is not None
    assert lses.grad is not None
    assert not outs.grad.isnan().any()
    assert not lses.grad.isnan().any()
    assert not outs.grad[:, 0].any()
    assert not lses.grad[:, 0].any()
    assert not outs.grad[0, 1].any()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_gradients() -> None:
    outs = torch.randn(3, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(3, 2, 4, dtype=torch.float64)
    lses[0, 0] = -torch.inf
    has_keys = torch.isfinite(lses)
    finite_lses = lses[has_keys].requires_grad_()

    def merged(outs: Tensor, finite_lses: Tensor) -> tuple[Tensor, ...]:
        return regard.merge(outs, torch.full_like(lses, -torch.inf).masked_scatter(has_keys, finite_lses))

    assert torch.autograd.gradcheck(merged, (outs, finite_lses), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(merged, (outs, finite_lses))


def test_gradients_pass_through_to_the_keys() -> None:
    q, k, v = (x.double().requires_grad_() for x in tensors())
    grads = [
        torch.autograd.grad((out**2).sum() + lse.sin().sum(), (q, k, v))
        for out, lse in (
            regard.merge(*partials(q, k, v, [0, 8, Lk])),
            regard.attention(q, k, v, mask=M.Causal(), return_lse=True),
        )
    ]
    for merged, expected in zip(*grads, strict=True):
        assert_close(merged, expected, rtol=1e-10, atol=1e-12)


def test_vmap() -> None:
    outs, lses = torch.randn(5, 2, 4, 3), torch.randn(5, 2, 4)
    mapped = torch.vmap(regard.merge)(outs, lses)
    for i in range(5):
        for a, b in zip(mapped, regard.merge(outs[i], lses[i]), strict=True):
            assert_close(a[i], b)


def test_a_sink_counts_once() -> None:
    q, k, v = tensors()
    sink = torch.randn(H)
    halves = [
        regard.attention(q, k[..., :9, :], v[..., :9, :], sink=sink, return_lse=True),
        regard.attention(q, k[..., 9:, :], v[..., 9:, :], return_lse=True),
    ]
    out, lse = regard.merge(*zip(*halves, strict=True))
    expected, expected_lse = regard.attention(q, k, v, sink=sink, return_lse=True)
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], TypeError, "outs: expected a tensor, or a list of at least one"),
        (torch.zeros(0, 2, 3), torch.zeros(0, 2), ValueError, "outs: expected N >= 1 results"),
        (
            [torch.zeros(2, 3), torch.zeros(2, 4)],
            torch.zeros(2, 2),
            ValueError,
            "outs: expected tensors of one",
        ),
        (torch.zeros(2, 5, 3), torch.zeros(2, 4), ValueError, r"lses: .* \(2, 5\), got \(2, 4\)"),
        (torch.zeros(2, 5, 3).long(), torch.zeros(2, 5), TypeError, "outs: expected dtype"),
        (torch.zeros(2, 5, 3).half(), torch.zeros(2, 5).half(), TypeError, "lses: expected torch.float32"),
        (torch.zeros(2, 5, 3), [torch.zeros(5), 3], TypeError, "lses: expected a tensor"),
    ],
)
def test_errors_name_the_argument(outs: object, lses: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        regard.merge(outs, lses)  # type: ignore[arg-type]
