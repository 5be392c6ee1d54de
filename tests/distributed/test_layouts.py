"""Layouts: which tokens a rank holds, and how evenly the work is divided."""

from __future__ import annotations

import pickle

import pytest
import torch

from regard import distributed as D, masks as M
from support import HAVE_CORE
from support.distributed import unsharded
from support.ranks import Ranks

LAYOUTS = [D.contiguous, D.zigzag, lambda L, ranks: D.striped(L, ranks, 3)]


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("L", [0, 1, 5, 16, 17, 101])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_layouts_hold_each_token_once(make, L: int, ranks: int) -> None:
    layout = make(L, ranks)
    assert (layout.L, layout.ranks) == (L, ranks)
    held = torch.cat([D.positions(layout, rank) for rank in range(ranks)])
    assert torch.equal(held.sort().values, torch.arange(L))
    assert layout == pickle.loads(pickle.dumps(layout))
    assert hash(layout) == hash(make(L, ranks))


def test_runs() -> None:
    assert D.contiguous(10, 4).runs == (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),))
    assert D.zigzag(8, 2).runs == (((0, 2), (6, 8)), ((2, 6),))
    assert D.striped(7, 2, 2).runs == (((0, 2), (4, 6)), ((2, 4), (6, 7)))
    assert D.zigzag(8, 4).grouped(2).runs == (((0, 2), (6, 8)), ((2, 6),))


def test_shards_hold_the_positions() -> None:
    layout, x = D.zigzag(13, 3), torch.randn(2, 13, 4)
    for rank in range(3):
        assert torch.equal(D.shard(x, layout, rank, 1), x[:, D.positions(layout, rank)])
        assert torch.equal(D.shard(x.mT, layout, rank, -1), x.mT[:, :, D.positions(layout, rank)])


def test_labels_follow_tokens_across_ranks() -> None:
    tokens, documents = torch.arange(100, 110), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    layout = D.striped(10, 2, 2)
    whole = torch.empty(10, dtype=torch.int64)
    for rank in range(2):
        whole[D.positions(layout, rank)] = D.next_tokens(tokens, layout, rank)
    assert whole.tolist() == [101, 102, 103, 104, 105, 106, 107, 108, 109, -100]
    labels = D.next_tokens(tokens, layout, 1, documents=documents, ignore=-1)
    assert labels.tolist() == [-1, 104, -1, 108]


def test_unshard(ranks: Ranks) -> None:
    for rank, (x, grad) in enumerate(ranks.run(3, unsharded)):
        assert torch.equal(x, torch.arange(26.0).view(2, 13))
        assert torch.equal(grad, torch.full((2, D.zigzag(13, 3).lengths[rank]), 1.0 + 2 + 3))


def documents(L: int, g: torch.Generator) -> torch.Tensor:
    """Returns the ids of 8 documents of random lengths."""
    return torch.searchsorted(torch.randint(0, L, (7,), generator=g).sort().values, torch.arange(L))


BALANCED = {
    "none": lambda L, g: None,
    "causal": lambda L, g: M.Causal(),
    "packed": lambda L, g: M.sliding(L // 9) & M.Documents(documents(L, g)),
    "longformer": lambda L, g: M.sliding(L // 20) | M.Global(range(L // 30)),
    "dense": lambda L, g: M.Dense(torch.rand(L, L, generator=g) > 0.7),
}


@pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("L", [997, 2048, 3001])
@pytest.mark.parametrize("name", BALANCED)
def test_balance(name: str, L: int, ranks: int) -> None:
    mask = BALANCED[name](L, torch.Generator().manual_seed(0))
    layout = D.balanced(mask, L, ranks)
    dense = torch.ones(L, L) if mask is None else mask.to_dense(L, L)
    pairs = [int(dense[D.positions(layout, rank)].sum()) for rank in range(ranks)]
    assert max(pairs) <= 1.05 * sum(pairs) / ranks
    if name in ("none", "causal", "dense"):
        assert sum(map(len, layout.runs)) <= 4 * ranks
    plan = D.plan(layout, mask=mask, method="ring")
    assert [sum(steps) for steps in plan.pairs] == pairs
    assert f"{plan.balance:.3f} x the mean" in str(plan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: D.contiguous(-1, 2), "L: expected an integer from 0"),
        (lambda: D.zigzag(8, 0), "ranks: expected an integer from 1"),
        (lambda: D.striped(8, 2, 0), "block: expected an integer from 1"),
        (lambda: D.Layout((((0, 3),), ((2, 5),))), "runs: expected runs"),
        (lambda: D.Layout((((3, 5), (0, 3)),)), "runs: expected ascending runs"),
        (lambda: D.shard(torch.zeros(9), D.contiguous(8, 2), 0, 0), "x: expected layout.L = 8"),
        (lambda: D.shard(torch.zeros(8), D.contiguous(8, 2), 2, 0), "rank: expected 0 to 1"),
        (lambda: D.plan(D.contiguous(8, 2), method="star"), "method: expected one of"),
    ],
)
def test_errors_name_the_argument(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_balanced_takes_a_mask() -> None:
    with pytest.raises(TypeError, match="mask: expected a Mask or None, got"):
        D.balanced(torch.ones(8, 8), 8, 2)
