"""Compares ALiBi and T5's relative bias with their published formulas."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from regard.scores import Alibi, RelativeBias

ODD = (1, 3, 17, 63, 65)


def distance(Lq: int, Lk: int, offset: int) -> Tensor:
    return offset + torch.arange(Lq)[:, None] - torch.arange(Lk)


def t5_bucket(relative_position: Tensor, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """Computes T5's buckets by its published formula. relative_position = key - query."""
    result = torch.zeros_like(relative_position)
    if bidirectional:
        buckets //= 2
        result += (relative_position > 0) * buckets
        n = relative_position.abs()
    else:
        n = -relative_position.clamp(max=0)
    exact = buckets // 2
    large = torch.log(n.float().clamp(min=exact) / exact) / math.log(max_distance / exact) * (buckets - exact)
    return result + torch.where(n < exact, n, (exact + large.long()).clamp(max=buckets - 1))


# ALiBi


def test_standard_slopes() -> None:
    assert Alibi.standard(8).slopes.tolist() == [2.0**-n for n in range(1, 9)]
    slopes = Alibi.standard(12).slopes
    assert slopes[:8].tolist() == [2.0**-n for n in range(1, 9)]
    torch.testing.assert_close(slopes[8:], torch.tensor([2.0**-e for e in (0.5, 1.5, 2.5, 3.5)]))
    assert Alibi.standard(1).slopes.tolist() == [2.0**-8]
    assert Alibi.standard(3, dtype=torch.float64).slopes.dtype == torch.float64


@pytest.mark.parametrize("L", ODD)
def test_alibi_is_slope_times_distance(L: int) -> None:
    slopes = torch.rand(3)
    for offset in (None, 0, -2, 9):
        start = 4 if offset is None else offset
        expected = -slopes[:, None, None] * distance(L, L + 4, start).abs()
        torch.testing.assert_close(Alibi(slopes).dense(L, L + 4, offset), expected)


@pytest.mark.parametrize("score", [Alibi(torch.rand(3)), RelativeBias(torch.randn(32, 3))], ids=repr)
def test_offset_per_sample(score: Alibi | RelativeBias) -> None:
    offsets = torch.tensor([0, 5])
    dense = score.dense(3, 4, offsets)
    assert dense.shape == (2, 3, 3, 4)
    for b, offset in enumerate(offsets.tolist()):
        assert torch.equal(dense[b], score.dense(3, 4, offset))
    assert score.heads == 3


# Relative bias


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (32, 20), (64, 256), (16, 1000), (8, 5), (4, 3), (128, 800)]
)
def test_buckets_match_t5(bidirectional: bool, buckets: int, max_distance: int) -> None:
    bias = RelativeBias(torch.randn(buckets, 2), bidirectional=bidirectional, max_distance=max_distance)
    distances = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    assert torch.equal(bias.bucket(distances), t5_bucket(-distances, bidirectional, buckets, max_distance))


def test_known_buckets() -> None:
    bias = RelativeBias(torch.randn(32, 2))
    assert bias.bucket(torch.tensor([0, 1, 7, 8, 12, 127, 500, -1, -500])).tolist() == [
        0, 1, 7, 8, 9, 15, 15, 17, 31,
    ]  # fmt: skip
    causal = RelativeBias(torch.randn(32, 2), bidirectional=False)
    assert causal.bucket(torch.tensor([0, 15, 127, 500, -1, -500])).tolist() == [0, 15, 31, 31, 0, 0]


@pytest.mark.parametrize("L", ODD)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_reads_the_table(L: int, bidirectional: bool) -> None:
    table = torch.randn(32, 3)
    bias = RelativeBias(table, bidirectional=bidirectional, max_distance=40)
    bucket = t5_bucket(-distance(L, L + 2, 2), bidirectional, 32, 40)
    assert torch.equal(bias.dense(L, L + 2), table[bucket].permute(2, 0, 1))


def test_by_distance() -> None:
    bias = RelativeBias(torch.randn(32, 3), max_distance=20)
    Lq, Lk, offset = 5, 9, 2
    lo, hi = offset - (Lk - 1), offset + Lq - 1
    by_distance = bias.by_distance(lo, hi)
    assert by_distance.shape == (3, hi - lo + 1)
    assert by_distance.is_contiguous()
    assert torch.equal(bias.dense(Lq, Lk, offset), by_distance[:, distance(Lq, Lk, offset) - lo])


def test_parameters_get_gradients() -> None:
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    table = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: Alibi(s).dense(3, 4), slopes)
    assert torch.autograd.gradcheck(lambda t: RelativeBias(t, max_distance=5).dense(3, 9), table)
    assert torch.autograd.gradcheck(lambda t: RelativeBias(t, max_distance=5).by_distance(-4, 9), table)
    assert Alibi(slopes).slopes is slopes
    assert RelativeBias(table).table is table


# Value semantics


def test_equality_hash_copies_and_repr() -> None:
    slopes, table = torch.rand(2), torch.randn(8, 2)
    scores = [Alibi(slopes), RelativeBias(table, max_distance=9), RelativeBias(table, bidirectional=False)]
    for score in scores:
        for twin in (copy.deepcopy(score), pickle.loads(pickle.dumps(score)), score.to("cpu")):
            assert twin == score
            assert hash(twin) == hash(score)
        assert [other == score for other in scores].count(True) == 1
        assert score.to("meta").dense(3, 4).device.type == "meta"
    assert Alibi(slopes) != Alibi(slopes + 1)
    assert Alibi(Parameter(slopes)) == Alibi(Parameter(slopes.clone()))
    assert Alibi(slopes.to("meta")) != Alibi(slopes.to("meta"))  # meta tensors have no values to compare
    assert repr(scores[0]) == "Alibi(<float32 (2,)>)"
    assert repr(scores[1]) == "RelativeBias(<float32 (8, 2)>, bidirectional=True, max_distance=9)"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Alibi([0.5]), TypeError, r"Alibi\(slopes\): expected a float tensor \(H,\), got list"),
        (lambda: Alibi(torch.arange(3)), TypeError, r"got int64 tensor of shape \(3,\)"),
        (
            lambda: Alibi(torch.rand(2, 2)),
            ValueError,
            r"Alibi\(slopes\): expected shape \(H,\), got \(2, 2\)",
        ),
        (lambda: Alibi.standard(0), ValueError, r"heads: expected an integer from 1 .*, got 0"),
        (lambda: Alibi.standard(2.0), TypeError, r"heads: expected an int, got float"),
        (lambda: RelativeBias(torch.rand(4)), ValueError, r"\(num_buckets, Hq\), got \(4,\)"),
        (lambda: RelativeBias(torch.rand(7, 2)), ValueError, r"expected an even number of buckets >= 4"),
        (
            lambda: RelativeBias(torch.rand(1, 2), bidirectional=False),
            ValueError,
            r"expected at least 2 buckets",
        ),
        (
            lambda: RelativeBias(torch.rand(32, 2), max_distance=8),
            ValueError,
            r"max_distance: expected an integer from 9 .*, got 8",
        ),
        (
            lambda: RelativeBias(torch.rand(32, 2), bidirectional=1),
            TypeError,
            r"bidirectional: expected a bool",
        ),
    ],
)
def test_wrong_arguments(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
