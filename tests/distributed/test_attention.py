"""Distributed attention against a single process: outputs, gradients, dropout, bytes, leaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import distributed as D, masks as M
from regard.distributed.layouts import in_order
from regard.scores import Alibi, RelativeBias
from support import HAVE_CORE
from support.distributed import (
    bytes_sent,
    case,
    changed_positions,
    check,
    events_of_ring,
    joined,
    on_isa,
    on_rank,
    second_derivatives,
    single,
)  # fmt: skip
from support.ranks import Ranks

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

L = 203
METHODS = ("ring", "gather", "ulysses")


def masks() -> dict[str, M.Mask | None]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 4, (L,), generator=g).sort().values
    return {
        "none": None,
        "causal": M.Causal(),
        "longformer": M.sliding(30) | M.Global([0, 77]),
        "documents": M.Documents(ids) & M.Causal(),
        "dense": M.Dense(torch.rand(1, 4, L, L, generator=g) > 0.4),
        "lengths": M.Lengths([100, 180]),
        "random": M.RandomBlocks(2, 16) & M.Dilated(5),
        "heads": M.PerHead([M.Causal(), M.Prefix(9), M.Dilated(3) & M.Causal(), M.sliding(12)]),
    }


def options(name: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    return {
        "plain": {},
        "alibi": {"bias": Alibi.standard(4), "softcap": 3.0, "sink": torch.randn(4, generator=g)},
        "bias": {"bias": torch.randn(1, 4, L, L, generator=g), "dropout": 0.3, "seed": 5},
        "rows": {"bias": torch.randn(2, 1, L, 1, generator=g), "scale": 0.2},
        "relative": {"bias": RelativeBias(torch.randn(32, 4, generator=g)), "dropout": 0.5, "seed": -1},
    }[name]


def layouts(n: int) -> dict[str, D.Layout]:
    return {
        "contiguous": D.contiguous(L, n),
        "zigzag": D.zigzag(L, n),
        "striped": D.striped(L, n, 20),
        "balanced": D.balanced(M.Causal() & M.sliding(90), L, n),
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", masks())
def test_equals_a_single_process(ranks: Ranks, name: str, n: int, method: str) -> None:
    cases = zip(layouts(n).items(), ("plain", "alibi", "bias", "relative"), strict=True)
    for i, ((_, layout), settings_name) in enumerate(cases):
        x = case(layout, method, mask=masks()[name], part_bytes=1 + i % 2 * 2**20, **options(settings_name))
        got, expected = check(ranks, n, x)
        if method != "ring":
            assert all(torch.equal(a, b) for a, b in zip(got[:2], expected[:2], strict=True))


@pytest.mark.parametrize("name", masks())
def test_ulysses_in_a_ring(ranks: Ranks, name: str) -> None:
    for layout, settings_name in zip(layouts(4).values(), ("rows", "alibi", "bias", "relative"), strict=True):
        x = case(layout, "usp", Hkv=4, part_bytes=1, mask=masks()[name], **options(settings_name))
        check(ranks, (2, 2), x)
    check(ranks, (2, 1), case(layouts(2)["zigzag"], "usp", mask=masks()[name], **options("bias")))
    check(ranks, (1, 2), case(layouts(2)["zigzag"], "auto", mask=masks()[name], **options("bias")))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 1e-13)]
)
def test_dtypes(ranks: Ranks, method: str, dtype: torch.dtype, tolerance: float) -> None:
    sink = torch.randn(4).to(dtype)
    x = case(
        D.zigzag(L, 3), method, dtype=dtype, mask=M.Causal(), sink=sink, dropout=0.2, seed=3, part_bytes=1
    )
    check(ranks, 3, x, tolerance)


@pytest.mark.parametrize(("Hq", "Hkv", "n"), [(3, 3, 2), (6, 2, 3), (8, 1, 3), (5, 5, 4), (12, 3, 4)])
def test_ulysses_with_uneven_heads(ranks: Ranks, Hq: int, Hkv: int, n: int) -> None:
    check(ranks, n, case(D.zigzag(L, n), "ulysses", Hq=Hq, Hkv=Hkv, mask=M.Causal(), dropout=0.2, seed=3))


@pytest.mark.parametrize("method", METHODS)
def test_cross_attention_with_two_layouts(ranks: Ranks, method: str) -> None:
    layout = (D.zigzag(90, 3), D.striped(130, 3, 25))
    bias = torch.randn(4, 90, 130)[None]
    check(ranks, 3, case(layout, method, mask=M.Causal() | M.Prefix(11), bias=bias))
    offsets = torch.tensor([11, 60])
    check(ranks, 3, case(layout, method, mask=M.sliding(40), offset=offsets, bias=Alibi.standard(4)))


@pytest.mark.parametrize("method", [*METHODS, "usp"])
def test_repeated_calls_are_bitwise_equal(ranks: Ranks, method: str) -> None:
    shape = (2, 2) if method == "usp" else 4
    x = case(D.balanced(M.Causal(), L, 4), method, mask=M.Causal(), part_bytes=1, **options("bias"))
    first, second = (ranks.run(shape, on_rank, x) for _ in range(2))
    assert all(
        torch.equal(a, b) for r, s in zip(first, second, strict=True) for a, b in zip(r, s, strict=True)
    )


def test_same_dropout_on_any_number_of_ranks(ranks: Ranks) -> None:
    """Values are unit vectors and scores are equal, so the output shows which weights are kept."""
    n = 60
    shown = []
    for count in (1, 2, 3, 4):
        x = case(D.striped(n, count, 7), "ring", Dv=n, dropout=0.5, seed=11)
        x.q.zero_()
        x.v = torch.eye(n).expand_as(x.v).clone()
        shown.append(joined(x, ranks.run(count, on_rank, x))[0] != 0)
    assert 0.4 < shown[0].float().mean() < 0.6
    assert all(torch.equal(shown[0], other) for other in shown[1:])


# Bytes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["none", "causal", "longformer", "documents", "random"])
def test_plan_counts_the_bytes(ranks: Ranks, name: str, method: str) -> None:
    mask = masks()[name]
    for layout in layouts(4).values():
        x = case(layout, method, mask=mask, part_bytes=1)
        expected = D.plan(layout, mask=mask, method=method, B=2, Hq=4, Hkv=2, D=16, Dv=24)
        assert sum(ranks.run(4, bytes_sent, x)) == expected.total_bytes


def test_no_byte_travels_for_documents_of_one_rank(ranks: Ranks) -> None:
    ids = torch.arange(4).repeat_interleave(50)
    x = case(D.contiguous(200, 4), "ring", mask=M.Documents(ids))
    assert ranks.run(4, bytes_sent, x) == [0, 0, 0, 0]
    causal = case(D.contiguous(200, 4), "ring", mask=M.Causal())
    row = 2 * 2 * (16 + 24) * 4
    assert ranks.run(4, bytes_sent, causal) == [3 * 50 * row, 2 * 50 * row, 50 * row, 0]


def test_the_next_block_travels_while_a_rank_computes(ranks: Ranks) -> None:
    for events in ranks.run(3, events_of_ring, case(D.contiguous(90, 3), "ring")):
        assert events == ["start", "compute", "wait", "start", "compute", "wait", "compute"]


# Leaks


def test_a_token_changes_exactly_the_positions_that_the_mask_allows(ranks: Ranks) -> None:
    g = torch.Generator().manual_seed(3)
    n, probes = 96, 0
    for i in range(50):
        window = int(torch.randint(1, 60, (), generator=g))
        ids = torch.randint(0, 5, (n,), generator=g).sort().values
        tokens = torch.randint(0, n, (3,), generator=g)
        kinds = [
            M.Causal(), M.sliding(window), M.Documents(ids) & M.Causal(),
            M.sliding(window) | M.Global(tokens), M.RandomBlocks(2, 8, seed=i) & M.Causal(),
            M.Dilated(1 + window % 7),
            M.Dense(torch.rand(n, n, generator=g) > 0.5), ~M.Documents(ids), M.Prefix(window) | M.Causal(),
            M.Blocks(torch.rand(1, 12, 12, generator=g) > 0.6, 8),
        ]  # fmt: skip
        mask, token = kinds[i % len(kinds)], int(torch.randint(0, n, (), generator=g))
        x = case(D.zigzag(n, 4), METHODS[i % 3], B=1, mask=mask)
        results = ranks.run(4, changed_positions, x, token)
        changed = torch.zeros(4, n, dtype=torch.bool)
        for rank, part in enumerate(results):
            changed[:, D.positions(x.layout, rank)] = part[0]
        assert torch.equal(changed, mask.to_dense(n, n)[..., token].expand(4, n)), (mask, token)
        probes += 1
    assert probes == 50


# Derivatives


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_second_derivatives(ranks: Ranks, method: str) -> None:
    x = case(D.zigzag(60, 2), method, dtype=torch.float64, mask=M.Causal(), dropout=0.2, seed=1)
    parts = ranks.run(2, second_derivatives, x)
    for i, expected in enumerate(second_derivatives(None, x)):
        torch.testing.assert_close(in_order([r[i] for r in parts], x.layout, 2), expected)


def test_a_ring_has_no_second_derivatives(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(2, second_derivatives, case(D.zigzag(60, 2), "ring"))
    assert all("create_graph: expected False with method='ring', got True" in str(x) for x in outcomes)


# Values that are not finite


@pytest.mark.parametrize("method", METHODS)
def test_nan_in_masked_keys_does_not_reach_results(ranks: Ranks, method: str) -> None:
    x = case(D.zigzag(90, 2), method, mask=M.Lengths([61, 90]))
    x.k[0, :, 61:], x.v[0, :, 61:] = torch.nan, torch.inf
    got, _ = check(ranks, 2, x)
    assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize("method", METHODS)
def test_sinks_may_be_infinite(ranks: Ranks, method: str) -> None:
    sink = torch.tensor([0.5, -torch.inf, 200.0, -torch.inf])
    got, _ = check(ranks, 2, case(D.zigzag(90, 2), method, mask=M.Causal() & ~M.Prefix(30), sink=sink))
    assert not any(t.isnan().any() for t in got)


# Panels


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_outputs_are_bitwise_those_of_one_process_on_every_instruction_set(
    ranks: Ranks, isa: str, method: str
) -> None:
    """Windows of `gather` begin where panels begin, which have 8, 16 or 32 rows."""
    masks = (M.Causal(), M.sliding(30) | M.Global([5]), M.Dilated(3), None)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for i, length in enumerate((33, 65, 97, 129, 203)):
        for n, layout in ((2, D.zigzag), (3, D.contiguous), (4, lambda L, n: D.striped(L, n, 9))):
            x = case(layout(length, n), method, mask=masks[(i + n) % 4], dtype=dtypes[i % 4])
            got, expected = joined(x, ranks.run(n, on_isa, isa, x)), single(x)
            assert all(torch.equal(a, b) for a, b in zip(got[:2], expected[:2], strict=True))
