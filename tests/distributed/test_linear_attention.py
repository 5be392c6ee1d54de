"""Distributed linear attention against a single process: outputs, states, gradients, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

from regard import distributed as D
from support.distributed_linear import Sharded, bytes_sent, call_with, joined, on_rank, sharded, single
from support.linear import FORMS, make
from support.ranks import Failure, Ranks

LAYOUTS = (D.contiguous, D.zigzag, lambda L, n: D.striped(L, n, 7))


def check(ranks: Ranks, n: int | tuple[int, int], x: Sharded, tolerance: float = 1e-5) -> None:
    """Checks all results against a single process: errors relative to the largest element."""
    got, expected = joined(x, ranks.run(n, on_rank, x)), single(x)
    assert got.keys() == expected.keys()
    for name, b in expected.items():
        largest = max(float(b.double().abs().max()), 1.0) if b.numel() else 1.0
        torch.testing.assert_close(
            got[name].double(), b.double(), rtol=0, atol=tolerance * largest, msg=f"{name} differs"
        )


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_equals_a_single_process(ranks: Ranks, form: str, n: int) -> None:
    for i, layout in enumerate(LAYOUTS):
        case = make(form, 139, state=i != 1, ragged=i == 2, seed=i, B=1 + i)
        check(ranks, n, sharded(case, layout(139, n)))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float64, 1e-13)]
)
def test_dtypes(ranks: Ranks, dtype: torch.dtype, tolerance: float) -> None:
    for form in ("normalized decayed", "gated delta"):
        check(ranks, 3, sharded(make(form, 139, dtype=dtype), D.zigzag(139, 3)), tolerance)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_backends(ranks: Ranks, impl: str) -> None:
    for form in ("normalized decayed", "gated delta"):
        case = make(form, 50, ragged=True)
        case.options["impl"] = impl
        check(ranks, 2, sharded(case, D.zigzag(50, 2)))


def test_options(ranks: Ranks) -> None:
    """Gates as numbers and by head, feature maps, a scale, one key head, few tokens."""
    of_head = torch.tensor([-0.1, -0.02])
    for options in (
        {"log_decay": of_head, "feature_map": "elu+1", "normalize": True},
        {"log_decay": -0.05, "beta": 0.5, "scale": 0.3},
        {"beta": of_head.exp(), "feature_map": "unit", "log_decay": of_head},
        {"feature_map": torch.square},
    ):
        case = make("plain", 61, state=False)
        check(ranks, 3, sharded(case._replace(options=options), D.striped(61, 3, 9)))
    check(ranks, 2, sharded(make("decayed", 61, Hq=3, Hkv=1, B=5), D.contiguous(61, 2)))


@pytest.mark.parametrize("L", [0, 1, 3])
def test_ranks_without_tokens(ranks: Ranks, L: int) -> None:
    for form in ("normalized decayed", "delta"):
        check(ranks, 4, sharded(make(form, L), D.contiguous(L, 4)))


@pytest.mark.parametrize("n", [1, 3])
def test_not_causal(ranks: Ranks, n: int) -> None:
    for form, layout in (("plain", D.striped(139, n, 10)), ("normalized", D.contiguous(2, n))):
        case = make(form, layout.L, ragged=True)
        case.options["causal"] = False
        check(ranks, n, sharded(case, layout))
    keys = make("normalized", 70)
    cross = keys._replace(q=make("normalized", 45, seed=3).q, options=keys.options | {"causal": False})
    check(ranks, n, sharded(cross, D.zigzag(45, n), D.striped(70, n, 9)))


@settings(max_examples=25, phases=(Phase.explicit, Phase.generate))
@given(st.sampled_from(FORMS), st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=9))
def test_every_layout(ranks: Ranks, form: str, runs: list[tuple[int, int]]) -> None:
    of_ranks: list[list[tuple[int, int]]] = [[], [], [], []]
    L = 0
    for length, rank in runs:
        of_ranks[rank].append((L, L := L + length))
    layout = D.Layout(tuple(map(tuple, of_ranks)))
    check(ranks, 4, sharded(make(form, L, D=5, Dv=3, ragged=True), layout))


def test_two_mesh_dims(ranks: Ranks) -> None:
    """The ranks of a model whose attention uses `usp`."""
    for causal in (True, False):
        case = make("normalized", 139)
        case.options["causal"] = causal
        check(ranks, (2, 2), sharded(case, D.zigzag(139, 4)))
        check(ranks, (1, 2), sharded(case, D.zigzag(139, 2)))


def test_padding_may_hold_nan(ranks: Ranks) -> None:
    case = make("normalized decayed", 60, B=2)
    case.options["lengths"] = torch.tensor([25, 60])
    for x in (case.q, case.k, case.v, case.options["log_decay"]):
        x[0, :, 25:] = torch.nan
    check(ranks, 3, sharded(case, D.zigzag(60, 3)))


def test_outputs_are_bitwise_those_of_a_single_process(ranks: Ranks) -> None:
    """Runs begin at multiples of 32 tokens, where the kernel's chunks begin."""
    for form in ("normalized decayed", "gated delta"):
        x = sharded(make(form, 256), D.striped(256, 4, 32))
        got, expected = joined(x, ranks.run(4, on_rank, x)), single(x)
        assert torch.equal(got["out"], expected["out"])
        assert torch.equal(got["end"], expected["end"])


def test_under_checkpointing(ranks: Ranks) -> None:
    check(ranks, 4, sharded(make("gated delta", 139), D.zigzag(139, 4), recompute=True))


def test_a_state_travels_once_from_run_to_run(ranks: Ranks) -> None:
    for form, columns in (("gated delta", 23), ("normalized decayed", 24)):
        state = 2 * 2 * 17 * columns * 4  # B, Hkv, D, Dv and z, float32
        x = sharded(make(form, 139, state=False), D.contiguous(139, 4))
        assert ranks.run(4, bytes_sent, x, False) == [(state, 0), (state, state), (state, state), (0, state)]
        assert sum(forward for forward, _ in ranks.run(4, bytes_sent, x, True)) == 6 * state
        x.layouts = (D.zigzag(139, 4),) * 2  # 7 runs: the middle chunks touch
        assert sum(forward for forward, _ in ranks.run(4, bytes_sent, x, False)) == 6 * state


# Errors

DIFFERENT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "heads": ([{"Hq": 4}, {"Hq": 2}], "Hq: expected the same on all ranks, got 4 and 2 on ranks 0 and 1"),
    "gate": ([{"log_decay": -0.1}, {"log_decay": -0.2}], "beta, scale, return_state, impl: expected the"),
    "form": ([{"causal": False}, {}], "causal, feature_map, normalize, log_decay, beta, scale"),
    "lengths": (
        [{"lengths": torch.tensor([4])}, {"lengths": torch.tensor([5])}], "lengths: expected the same"
    ),
    "too long": ([{"lengths": torch.tensor([18])}], "lengths: expected from 0 to L = 17, got values from 18"),
    "two layouts": (
        [{"layout": (D.contiguous(17, 2), D.Layout((((8, 17),), ((0, 8),))))}],
        "layout: expected one layout with causal=True",
    ),
    "not causal": ([{"causal": False, "beta": 0.5}], "beta: expected None with causal=False"),
    "unknown": ([{"impl": "star"}], "impl: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_all_ranks_raise(ranks: Ranks, name: str) -> None:
    of_ranks, message = DIFFERENT[name]
    outcomes = ranks.outcomes(2, call_with, [9, 8], of_ranks)
    assert all(isinstance(x, Failure) and message in str(x).splitlines()[0] for x in outcomes), outcomes


def test_one_invalid_rank_raises_on_the_others(ranks: Ranks) -> None:
    first, second = ranks.outcomes(2, call_with, [9, 8], [{}, {"log_decay": torch.zeros(3)}])
    assert "log_decay: expected a valid argument on all ranks, got an invalid one on rank 1" in str(first)
    assert "log_decay: expected (Hkv,) = (4,) or a shape broadcastable" in str(second)


def test_words_of_other_libraries() -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(TypeError, match="is_causal: write causal="):
        D.linear_attention(x, x, x, mesh=2, is_causal=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh"):
        D.linear_attention(x, x, x, mesh=2)  # type: ignore[arg-type]
