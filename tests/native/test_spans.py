"""Spans that the native core derives from a mask, against the dense mask."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from regard import masks as M
from regard._backends.native import attention as _native, core
from regard._call.make import make
from regard._call.spec import Options, Problem
from support import HAVE_CORE
from support.strategies import Case, mask_strategy

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

Span = tuple[int, int, int]


def problem_of(case: Case) -> Problem:
    q = torch.zeros(*case.batch, case.heads, case.Lq, 1)
    k = torch.zeros(*case.batch, case.heads, case.Lk, 1)
    return make(q, k, k, Options(mask=case.mask, offset=case.offset))


def dense_from_spans(spans: list[Span], count: int, keys: int) -> Tensor:
    """Converts spans to a bool matrix (count, keys)."""
    dense = torch.zeros(count, keys, dtype=torch.bool)
    rows = torch.arange(count)
    for begin, end, lanes in spans:
        dense[:, begin:end] = (lanes >> rows & 1).bool()[:, None]
    return dense


def check_order(spans: list[Span], count: int, keys: int, joined: bool = True) -> None:
    """Checks that spans ascend, are disjoint, nonempty and within the keys.

    If `joined`, adjacent spans must have different lanes.
    """
    for begin, end, lanes in spans:
        assert 0 <= begin < end <= keys
        assert 0 < lanes < 1 << count
    for (_, end, lanes), (begin, _, next_lanes) in pairwise(spans):
        assert end < begin or (end == begin and not (joined and lanes == next_lanes)), spans


def check_panels(case: Case, size: int, step: int, every: int = 1) -> None:
    """Checks panels of `size` rows with stride `step`, for each sample and head.

    A panel starts at every `every`-th row.
    """
    problem, dense = problem_of(case), case.dense()
    for b, offset in enumerate(case.offsets):
        for h in range(case.heads):
            for row in range(0, case.Lq, every):
                count = min(size, -(-(case.Lq - row) // step))
                panel = dense[b, h, row : row + count * step : step, (offset + row) % step :: step]
                spans = _native.spans(problem, b, h, row, count, step)
                check_order(spans, count, panel.shape[1])
                assert torch.equal(dense_from_spans(spans, count, panel.shape[1]), panel), (b, h, row, spans)


@given(mask_strategy(), st.sampled_from((1, 2, 3, 16, 32)))
def test_spans_match_the_mask(case: Case, size: int) -> None:
    check_panels(case, size, 1)


@given(mask_strategy(sizes=(1, 3, 17, 40), batches=((), (2,)), most_heads=2), st.integers(2, 6))
def test_spans_of_a_residue_class(case: Case, step: int) -> None:
    check_panels(case, 16, step, every=3)


@given(mask_strategy(sizes=(31, 33, 64), batches=((),), most_heads=1))
def test_spans_of_long_rows(case: Case) -> None:
    check_panels(case, 32, 1, every=13)


@given(mask_strategy(sizes=(3, 17, 40), batches=((), (2,)), most_heads=2), st.data(), st.integers(1, 3))
def test_spans_of_a_cut(case: Case, data: st.DataObject, step: int) -> None:
    q0, k0 = data.draw(st.integers(0, case.Lq - 1)), data.draw(st.integers(0, case.Lk - 1))
    q1, k1 = data.draw(st.integers(q0 + 1, case.Lq)), data.draw(st.integers(k0 + 1, case.Lk))
    mask = case.mask.cut(q0, q1, k0, k1, Lq=case.Lq, Lk=case.Lk)
    offset = (case.Lk - case.Lq if case.offset is None else case.offset) + q0 - k0
    check_panels(Case(mask, case.batch, case.heads, q1 - q0, k1 - k0, offset), 16, step)


def test_no_mask_is_one_full_span() -> None:
    problem = make(torch.zeros(1, 20, 1), torch.zeros(1, 70, 1), torch.zeros(1, 70, 1))
    assert _native.spans(problem, 0, 0, 3, 16) == [(0, 70, 0xFFFF)]
    assert _native.spans(problem, 0, 0, 0, 1) == [(0, 70, 1)]


def test_causal_spans_are_a_staircase() -> None:
    problem = make(*[torch.zeros(1, 4, 1)] * 3, Options(mask=M.Causal()))
    assert _native.spans(problem, 0, 0, 0, 4) == [
        (0, 1, 0b1111),
        (1, 2, 0b1110),
        (2, 3, 0b1100),
        (3, 4, 0b1000),
    ]


@pytest.mark.parametrize("mask", [None, M.Causal(), M.Window(0, None), ~M.Global([0]), M.Prefix(1)])
def test_a_residue_class_without_keys_has_no_spans(mask: M.Mask | None) -> None:
    problem = make(
        torch.zeros(1, 8, 1), torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), Options(mask=mask, offset=0)
    )
    assert _native.spans(problem, 0, 0, 3, 2, 4) == []


@pytest.mark.parametrize("step", [1, 3])
def test_global_tokens_in_rows_and_beyond_the_keys(step: int) -> None:
    """Global tokens may be adjacent or single, and lie beyond the keys or beyond all queries."""
    tokens = M.Global([3, 4, 5, 9, 20, 21, 40, 41, 43, 2**63 - 1])
    for mask in (tokens, ~tokens, tokens & M.Window(7, 2), tokens | M.RandomBlocks(2, 3, 5)):
        check_panels(Case(mask, (), 1, 29, 31, 17), 16, step)


@pytest.mark.parametrize("offset", [-(2**48), -7, 2**48 - 9])
def test_positions_far_from_zero(offset: int) -> None:
    for mask in (M.Causal(), M.Window(3, 2), M.Dilated(3), M.Window(None, 4), M.RandomBlocks(2, 4, 1)):
        check_panels(Case(mask, (), 1, 5, 9, offset), 16, 1)


# Cost


@given(mask_strategy(sizes=(1, 5, 17, 40)))
def test_cost_counts_the_pairs(case: Case) -> None:
    cost = _native.cost(problem_of(case))
    assert cost.pairs == int(case.dense().sum())
    assert cost.touched >= cost.pairs
    assert min(cost.full, cost.partial, cost.empty) >= 0


def square(mask: M.Mask | None, L: int, heads: int = 1) -> Problem:
    x = torch.zeros(1, heads, L, 64)
    return make(x, x, x, Options(mask=mask))


@pytest.mark.parametrize("step", [2, 3, 5])
def test_dilation_divides_the_work(step: int) -> None:
    L = 30 * core.panel_rows()
    undilated = _native.cost(square(M.Causal(), L)).touched
    dilated = _native.cost(square(M.Causal() & M.Dilated(step), L)).touched
    assert dilated < 1.25 * undilated / step


@pytest.mark.parametrize(
    ("mask", "step"),
    [
        (M.Dilated(4) & M.Dilated(6), 12),
        (M.Dilated(4) | M.Dilated(6), 2),
        (M.Dilated(4) | M.Causal(), 1),
        (~M.Dilated(4), 1),
        (M.PerHead([M.Dilated(3)]), 3),
    ],
)
def test_dilation_of_combinations(mask: M.Mask, step: int) -> None:
    """Each panel has Lk / step keys in its residue class, which are full, partial or empty."""
    L = 192 * step
    cost = _native.cost(square(mask, L))
    assert cost.full + cost.partial + cost.empty == (L // core.panel_rows()) * (L // step)


def test_cost_of_a_window_is_linear() -> None:
    small, large = (_native.cost(square(M.Window(64, 0), L)).touched for L in (1024, 4096))
    assert large < 4.3 * small
    assert large < 0.1 * 4096 * 4096


def fastest(run: Callable[[], Any], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


SPARSE = {
    "causal": M.Causal(),
    "window": M.Window(256, 0),
    "padding": M.Lengths(4000) & M.Causal(),
    "packed": M.Documents(torch.arange(4096) // 300) & M.Causal(),
    "longformer": M.longformer((256, 256), [0, 1, 2]),
    "bigbird": M.bigbird(64),
    "dilated": M.Causal() & M.Dilated(4),
    "heads": M.PerHead([M.Window(64 * (h + 1), 0) for h in range(8)]),
    "blocks": M.Blocks(torch.ones(64, 64).tril().bool(), 64),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SPARSE)
def test_spans_take_less_than_a_percent_of_forward(name: str) -> None:
    torch.set_num_threads(1)
    problem = square(SPARSE[name], 4096, heads=8)
    _native.forward(problem)
    assert fastest(lambda: _native.cost(problem)) < 0.01 * fastest(lambda: _native.forward(problem), 3)
