"""Invalid and differing calls raise on every rank, and name the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import distributed as D, masks as M
from support import HAVE_CORE
from support.distributed_faults import (
    TIMEOUT,
    call_with,
    dies,
    overflow,
    stalls,
    three_dims,
    with_dtensors,
)  # fmt: skip
from support.ranks import Failure, Ranks

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


def messages(ranks: Ranks, shape: Any, lengths: list[int], *of_ranks: dict[str, Any]) -> list[str]:
    outcomes = ranks.outcomes(shape, call_with, lengths, list(of_ranks))
    assert all(isinstance(x, Failure) for x in outcomes), outcomes
    return [str(x).splitlines()[0] for x in outcomes]


SAME: dict[str, Any] = {}
MASKS = [{"mask": M.Documents([0] * 9 + [i] * 8), "debug": True} for i in (1, 2)]
DIFFERENT = {
    "heads": ([9, 8], [{"Hq": 4}, {"Hq": 2}], "Hq: expected the same on all ranks, got 4 and 2 on ranks 0"),
    "width": ([9, 8], [{"D": 8}, {"D": 4}], "D: expected the same"),
    "code": ([9, 8], [{"mask": M.Causal()}, {"mask": M.sliding(3)}], "mask: expected the same"),
    "ids": ([9, 8], MASKS, "mask: expected the same on all ranks, got different ones on ranks 0 and 1"),
    "scale": ([9, 8], [{"scale": 1.0}, {"scale": 2.0}], "scale, softcap, dropout, return_lse, impl"),
    "seed": ([9, 8], [{"dropout": 0.5, "seed": 1}, {"dropout": 0.5, "seed": 2}], "seed: expected the same"),
    "method": ([9, 8], [{"method": "ring"}, {"method": "gather"}], "method: expected the same"),
    "layout": (
        [9, 9], [{"layout": D.contiguous(18, 2)}, {"layout": D.zigzag(18, 2)}], "layout: expected the same"
    ),
    "lengths": ([8, 9], [SAME], "q: expected lengths (9, 8) on the ranks"),
    "mask size": ([9, 8], [{"mask": M.Documents([0] * 9)}], "Documents(q_ids): expected shape"),
    "bias size": ([9, 8], [{"bias": torch.zeros(9, 9)}], "bias: expected a shape broadcastable"),
    "divided heads": ([9, 8], [{"Hq": 1, "method": "ulysses"}], "mesh: expected at most Hq = 1 ranks"),
    "usp": ([9, 8], [{"method": "usp"}], "mesh: expected two dims (ring, Ulysses) for method='usp', got 1"),
    "other backend": ([9, 8], [{"method": "ring", "impl": "torch"}], "impl: expected the native kernels for"),
    "unknown": ([9, 8], [{"method": "star"}], "method: expected one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_all_ranks_raise(ranks: Ranks, name: str) -> None:
    lengths, of_ranks, message = DIFFERENT[name]
    assert all(message in text for text in messages(ranks, 2, lengths, *of_ranks))


def test_one_invalid_rank_raises_on_the_others(ranks: Ranks) -> None:
    layout = {"layout": D.contiguous(17, 2)}
    first, second = messages(ranks, 2, [9, 9], layout)
    assert "layout: expected a valid argument on all ranks, got an invalid one on rank 1" in first
    assert "layout: expected a layout of q's length: rank 1 has 8 of 17 tokens, got q with 9" in second
    first, second = messages(ranks, 2, [9, 8], SAME, {"softcap": -1.0})
    assert "softcap: expected a valid argument on all ranks" in first
    assert "softcap: expected a finite number above 0" in second


def test_two_dims_need_usp(ranks: Ranks) -> None:
    assert all("mesh: expected one dim" in x for x in messages(ranks, (2, 2), [2] * 4, {"method": "ring"}))


def test_tensors_are_compared_in_debug_mode_alone(ranks: Ranks) -> None:
    sinks = [{"sink": torch.full((4,), float(i))} for i in range(2)]
    assert not any(isinstance(x, Failure) for x in ranks.outcomes(2, call_with, [9, 8], sinks))
    assert all(
        "sink: expected the same" in x
        for x in messages(ranks, 2, [9, 8], *(s | {"debug": True} for s in sinks))
    )


def test_one_rank(ranks: Ranks) -> None:
    (out,) = ranks.run(1, call_with, [9], [{"mask": M.Causal()}])
    assert out.shape == (1, 4, 9, 8)


def test_mesh_is_a_device_mesh() -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh"):
        D.attention(x, x, x, mesh=2)  # type: ignore[arg-type]


def test_a_mesh_of_three_dims_raises(ranks: Ranks) -> None:
    assert all("mesh: expected 2 dim(s), got 3" in x for x in ranks.run(4, three_dims))


def test_dtensors_raise(ranks: Ranks) -> None:
    for messages_of_rank in ranks.run(2, with_dtensors):
        for name, message in messages_of_rank.items():
            assert message.startswith(f"TypeError: {name}: expected a plain tensor"), message


@pytest.mark.parametrize(("shape", "method"), [(2, "ring"), ((2, 2), "usp")])
def test_overflow_on_one_rank_raises_on_all(ranks: Ranks, shape: Any, method: str) -> None:
    """The scores of one row are infinite, which a ring cannot merge. The next call works."""
    for first, second in ranks.run(shape, overflow, method):
        assert first.startswith("FloatingPointError: q, k: expected scores in the range of the compute type")
        assert second == ""
    for first, second in ranks.run(2, overflow, "gather"):
        assert (first, second) == ("", "")


# Faults: each in a pool of its own, whose processes end


@pytest.mark.parametrize(
    ("fault", "method", "exchange"),
    [
        (dies, "gather", 0),  # before the call
        (dies, "ring", 1),  # in forward, between the comparison of the calls and the first step
        (dies, "linear", 2),  # in backward
        (stalls, "ring", 2),  # in backward
    ],
)
def test_a_fault_raises_on_the_other_rank_within_the_time_out(fault: Any, method: str, exchange: int) -> None:
    """A rank that waits for longer ends its process (`support.ranks.STUCK`)."""
    pool = Ranks(2, timeout=TIMEOUT)
    try:
        pool.run(2, call_with, [9, 8], [{}])
        for tasks in pool.tasks:
            tasks.put((2, fault, (method, exchange)))
        outcome = pool.result(0)
        assert isinstance(outcome, Failure)
        assert "regard.distributed: rank 0 of 2 waited for" in str(outcome)
    finally:
        pool.close()
