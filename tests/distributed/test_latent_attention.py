"""Distributed latent attention against a single process: outputs, gradients, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import distributed as D, masks as M
from support import HAVE_CORE
from support.distributed_latent import (
    NOPE,
    RANK,
    ROPE,
    VALUE,
    Sharded,
    alive_after_forward,
    bytes_sent,
    call_with,
    case,
    joined,
    on_rank,
    single,
)  # fmt: skip
from support.ranks import Failure, Ranks

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

L = 150
METHODS = ("ring", "gather", "ulysses")
MASKS = {"causal": M.Causal(), "window": M.sliding(40) | M.Global([3]), "none": None}


def layouts(n: int) -> list[D.Layout]:
    return [D.contiguous(L, n), D.zigzag(L, n), D.striped(L, n, 20)]


def check(ranks: Ranks, shape: Any, x: Sharded, tolerance: float = 1e-5) -> None:
    """Checks all results against a single process: errors relative to the largest element."""
    for a, b in zip(joined(x, ranks.run(shape, on_rank, x)), single(x), strict=True):
        largest = max(float(b.abs().max()), 1.0)
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_equals_a_single_process(ranks: Ranks, n: int, method: str, absorbed: bool) -> None:
    for layout, mask in zip(layouts(n), MASKS.values(), strict=True):
        check(ranks, n, case(layout, method, absorbed=absorbed, mask=mask, dropout=0.2, seed=3))


@pytest.mark.parametrize("absorbed", [True, False])
def test_ulysses_in_groups(ranks: Ranks, absorbed: bool) -> None:
    for layout, mask in zip(layouts(4), MASKS.values(), strict=True):
        check(ranks, (2, 2), case(layout, "usp", absorbed=absorbed, mask=mask, dropout=0.2, seed=3))
    check(ranks, (2, 1), case(layouts(2)[1], "auto", absorbed=absorbed, mask=M.Causal()))


def test_heads_in_parts(ranks: Ranks) -> None:
    """Keys and values of all heads together are larger than a part."""
    for method in METHODS:
        check(ranks, 2, case(D.zigzag(3000, 2), method, H=12, B=1, mask=M.Causal(), dropout=0.1, seed=1))


@pytest.mark.parametrize("method", METHODS)
def test_dtypes(ranks: Ranks, method: str) -> None:
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float64, 1e-13)):
        x = case(D.zigzag(L, 3), method, dtype=dtype, mask=M.Causal(), scale=0.2)
        check(ranks, 3, x, tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_few_tokens(ranks: Ranks, method: str) -> None:
    for absorbed in (True, False):
        check(ranks, 4, case(D.contiguous(3, 4), method, absorbed=absorbed, mask=M.Causal()))


@pytest.mark.parametrize("method", METHODS)
def test_keys_and_values_are_not_saved(ranks: Ranks, method: str) -> None:
    for alive in ranks.run(2, alive_after_forward, case(D.contiguous(L, 2), method, mask=M.Causal())):
        assert alive == [False, False]


# Bytes


@pytest.mark.parametrize("method", METHODS)
def test_plan_counts_the_bytes_of_latents(ranks: Ranks, method: str) -> None:
    sizes = {True: {"Hkv": 1, "D": RANK + ROPE, "Dv": RANK}, False: {"D": NOPE + ROPE, "Dv": VALUE}}
    for absorbed, of_form in sizes.items():
        for mask in MASKS.values():
            x = case(D.contiguous(L, 4), method, absorbed=absorbed, mask=mask)
            plan = D.plan(x.layout, mask=mask, method=method, B=2, Hq=4, latent=RANK + ROPE, **of_form)
            assert sum(forward for forward, _ in ranks.run(4, bytes_sent, x)) == plan.total_bytes


def test_latents_travel_and_nothing_else(ranks: Ranks) -> None:
    x = case(D.contiguous(200, 4), "gather", mask=M.Causal())
    block = 2 * 50 * (RANK + ROPE) * 4  # B, tokens, channels, float32
    assert ranks.run(4, bytes_sent, x) == [
        (3 * block, 0), (2 * block, block), (block, 2 * block), (0, 3 * block)
    ]  # fmt: skip


# Errors

DIFFERENT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "width": ([{}, {"latent": (1, 9, 40), "q": (1, 4, 9, 26)}], "D: expected the same on all ranks"),
    "latent": ([{"latent": (1, 9, 5)}], "latent: expected (B, length, rank + rope) with rank = 24, got"),
    "up": ([{"up": (3, NOPE + VALUE, RANK)}], "up: expected (H = 4, nope + value, rank = 24) with nope = 10"),
    "length": ([{"latent": (1, 8, RANK + ROPE)}], "layout: expected a layout of k's length"),
    "rank": ([{"rank": 0}], "rank: expected"),
    "heads": ([{"q": (1, 1, 9, NOPE + ROPE), "up": (1, NOPE + VALUE, RANK), "method": "ulysses"}],
              "mesh: expected at most Hq = 1 ranks"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_all_ranks_raise(ranks: Ranks, name: str) -> None:
    of_ranks, message = DIFFERENT[name]
    outcomes = ranks.outcomes(2, call_with, [{"layout": D.contiguous(18, 2)} | x for x in of_ranks])
    assert all(isinstance(x, Failure) and message in str(x).splitlines()[0] for x in outcomes), outcomes


def test_one_invalid_rank_raises_on_the_others(ranks: Ranks) -> None:
    first, second = ranks.outcomes(2, call_with, [{}, {"latent": (1, 9, 5)}])
    assert "latent: expected a valid argument on all ranks, got an invalid one on rank 1" in str(first)
    assert "latent: expected (B, length, rank + rope)" in str(second)
