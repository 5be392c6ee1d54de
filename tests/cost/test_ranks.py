"""Costs of attention over processes: against `distributed.plan` and against counted bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard import cost, distributed as D, masks as M
from regard.cost import CallSpec
from regard.cost._ranks import RankPass
from regard.cost._steps import Steps
from support import HAVE_CORE
from support.rank_costs import bytes_of_passes
from support.ranks import Ranks

native = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

MASKS: dict[str, M.Mask | None] = {
    "none": None,
    "causal": M.Causal(),
    "window": M.sliding(30),
    "both sides": M.Window(3, 9),
    "left": M.Window(5, None),
    "unlimited": M.Window(None, None),
    "sinks": M.streaming(20, 3),
    "documents": M.Documents(torch.arange(101) // 17) & M.Causal(),
}
LAYOUTS = {
    "contiguous": D.contiguous,
    "zigzag": D.zigzag,
    "balanced": lambda L, ranks: D.balanced(M.Causal(), L, ranks),
}
SPEED: dict[str, Any] = {"flops": 1e12, "link": cost.RankLink(1e9, 1e-4)}


def by_method(call: CallSpec, ranks: int, **options: Any) -> dict[str, cost.RanksCost]:
    return {x.method: x for x in cost.over_ranks(call, ranks, **options)}


@native
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("name", MASKS)
def test_bytes_and_pairs_are_those_of_the_plan(name: str, ranks: int, layout: str) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float64)[ranks % 3]
    where, sizes = LAYOUTS[layout](101, ranks), {"B": 2, "Hq": 6, "Hkv": 2, "D": 8, "Dv": 5}
    costs = by_method(CallSpec(**sizes, Lq=101, dtype=dtype, mask=MASKS[name]), ranks, layout=where, **SPEED)
    assert ("ulysses" in costs) == (1 < ranks <= 6)
    for method in costs.keys() - {"usp"}:
        plan = D.plan(where, mask=MASKS[name], method=method, dtype=dtype, **sizes)
        received = [sum(sizes) for sizes in plan.bytes]
        assert (costs[method].received_bytes, costs[method].total_bytes) == (max(received), sum(received))
        flops = 2 * 13 * max(map(sum, plan.pairs))
        assert costs[method].compute == pytest.approx(flops / 1e12, rel=1e-12)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "causal", "window", "documents"])
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses", "usp"])
def test_bytes_are_those_that_processes_send(
    ranks: Ranks, method: str, name: str, dtype: torch.dtype
) -> None:
    for Hkv, layout in ((2, D.contiguous(101, 4)), (4, D.zigzag(101, 4)), (1, D.contiguous(101, 4))):
        call = CallSpec(2, 4, 101, 16, Hkv, Dv=24, dtype=dtype, mask=MASKS[name])
        sent = ranks.run((2, 2) if method == "usp" else 4, bytes_of_passes, call, layout, method)
        predicted = [
            by_method(call, 4, layout=layout, passes=passes)[method] for passes in ("forward", "training")
        ]
        assert [x.total_bytes for x in predicted] == [sum(own) for own in zip(*sent, strict=True)]


LAYER = CallSpec(Hq=32, Hkv=8, Lq=1_000_000, D=128, dtype=torch.bfloat16, mask=M.Causal())


def test_a_single_rank_sends_nothing() -> None:
    costs = by_method(CallSpec(Hq=4, Lq=100, D=8), 1, flops=1e9, passes="training")
    assert costs.keys() == {"ring", "gather"}
    for x in costs.values():
        assert (x.received_bytes, x.total_bytes, x.messages, x.communication) == (0, 0, 0, 0.0)
        assert x.seconds == x.compute == pytest.approx(4 * 100**2 * (2 * 16 + 2 * 40) / 1e9)


def test_more_ranks_compute_less_and_hold_less() -> None:
    by_ranks = [by_method(LAYER, ranks) for ranks in (2, 8, 32, 128, 512)]
    for method in ("ring", "gather"):
        for few, many in itertools.pairwise(costs[method] for costs in by_ranks):
            assert many.compute == pytest.approx(few.compute / 4, rel=1e-3)
            assert many.memory_bytes < few.memory_bytes
            assert many.received_bytes > few.received_bytes
            assert many.messages > few.messages


@pytest.mark.parametrize("mask", [None, M.Causal(), M.sliding(4096)], ids=str)
@pytest.mark.parametrize("passes", ["forward", "training"])
def test_seconds_lie_between_computing_and_no_overlap(mask: M.Mask | None, passes: RankPass) -> None:
    call = replace(LAYER, mask=mask)
    for x in cost.over_ranks(call, 64, link=cost.RankLink(1e7, 1e-3), passes=passes):
        waits = 1.02 if x.method == "ring" else 1 + 1e-9  # for ranks with more work or more bytes
        assert x.compute < x.seconds <= (x.compute + x.communication) * waits
        assert x.method == "ring" or x.seconds > 0.99 * x.communication
    for slower in ({"flops": 1e9}, {"link": cost.RankLink(1e6, 50e-6)}, {"link": cost.RankLink(latency=1.0)}):
        slow = by_method(call, 64, passes=passes, **slower)
        for name, x in by_method(call, 64, passes=passes).items():
            assert slow[name].seconds > x.seconds, (name, slower)


def test_a_ring_hides_messages_that_are_shorter_than_computing() -> None:
    """Two ranks with equal work: step 0, then the longer of computing and receiving, then step 1."""
    call = CallSpec(Hq=1, Lq=2000, D=64)
    row, pairs = 1000 * 128 * 4, 1000**2
    for bandwidth, latency in ((1e9, 1e-6), (1e6, 1e-3)):
        x = by_method(call, 2, flops=1e9, link=cost.RankLink(bandwidth, latency))["ring"]
        step, arriving = pairs * 256 / 1e9, 2 * latency + row / bandwidth
        assert x.seconds == pytest.approx(latency + step + max(step, arriving))
        assert x.communication == pytest.approx(latency + arriving)
        assert (x.received_bytes, x.messages) == (row, 3)


def test_usp_takes_the_fastest_mesh() -> None:
    latency_counts = by_method(LAYER, 64, flops=1e18, link=cost.RankLink(1e15, 1e-3))["usp"]
    assert latency_counts.mesh == (8, 8)
    bytes_count = by_method(LAYER, 64, flops=1e18, link=cost.RankLink(1e6, 0.0))["usp"]
    assert bytes_count.mesh[1] >= 8  # a rank needs one of 8 key heads
    assert bytes_count.ranks == 64
    assert "usp" not in by_method(LAYER, 7)


@native
def test_memory_of_a_ring_is_that_of_shards_and_blocks() -> None:
    call = CallSpec(Hq=8, Lq=16_384, D=64, mask=M.Causal())
    shard = 4096 * 8 * 64 * 4
    ring = by_method(call, 4)["ring"]
    assert 4 * shard < ring.memory_bytes < 4 * shard + 3 * 2**22
    assert by_method(call, 4)["gather"].memory_bytes > 4 * shard + 2 * 16_384 * 8 * 64 * 4


def test_thousands_of_ranks() -> None:
    """The closed form does not overflow: the pairs of all ranks add up to those of the mask."""
    L = 100_000_000
    steps = Steps.of(M.sliding(4096), D.contiguous(L, 512))
    assert int(steps.pairs.sum()) == 4096 * L - 4096 * 4095 // 2
    assert int(Steps.of(M.Causal(), D.zigzag(L, 64)).pairs.sum()) == L * (L + 1) // 2
    assert int(Steps.of(None, D.zigzag(2**31, 2)).pairs.sum()) == 2**62


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cost.over_ranks(LAYER, 0), ValueError, "ranks: expected an integer from 1"),
        (lambda: cost.over_ranks(LAYER, 2.0), TypeError, "ranks: expected an int, got"),
        (lambda: cost.over_ranks(replace(LAYER, Lq=9), 10), ValueError, "ranks: expected at most 9, for 9"),
        (lambda: cost.over_ranks(LAYER, 8193), ValueError, "ranks: expected at most 8,192, for 1,000,000"),
        (lambda: cost.over_ranks(LAYER, 8, flops=0.0), ValueError, "flops: expected a positive number"),
        (lambda: cost.over_ranks(LAYER, 8, flops="x"), TypeError, "flops: expected a number"),
        (lambda: cost.over_ranks(LAYER, 8, passes="both"), ValueError, "passes: expected one of forward"),
        (
            lambda: cost.over_ranks(LAYER, 8, layout=D.zigzag(9, 8)), ValueError,
            "layout: expected a Layout of 8 ranks and 1000000 tokens, got 8 and 9",
        ),
        (lambda: cost.over_ranks(LAYER, 8, layout=8), ValueError, "layout: expected a Layout of 8"),
        (lambda: cost.over_ranks(replace(LAYER, Lk=3), 8), ValueError, "call: expected self-attention"),
        (lambda: cost.over_ranks(replace(LAYER, Lq=2**32), 8), ValueError, "call: expected at most 2,147"),
        (
            lambda: cost.over_ranks(replace(LAYER, mask=M.streaming(9, 1)), 512), ValueError,
            "ranks: expected at most 65,536 pairs of runs with a mask that is no window, got 262,144",
        ),
        (
            lambda: cost.over_ranks(CallSpec(Hq=2, Lq=9, mask=M.PerHead([M.Causal(), M.Prefix(3)])), 2),
            ValueError, "mask: expected the same mask for all samples and heads",
        ),
        (lambda: cost.RankLink(bandwidth=0), ValueError, "bandwidth: expected a positive number, got 0"),
        (lambda: cost.RankLink(bandwidth=float("nan")), ValueError, "bandwidth: expected a positive"),
        (lambda: cost.RankLink(latency=-1.0), ValueError, "latency: expected a number of seconds from 0"),
        (lambda: cost.ranks_table(LAYER, []), ValueError, "ranks: expected at least one number, got none"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# The command

SMALL = ("--width", "512", "--heads", "8", "--tokens", "4096")


def run(*arguments: str) -> Any:
    testing = pytest.importorskip("typer.testing")
    from regard.cli._app import app

    return testing.CliRunner().invoke(app, ["cost", *arguments])


def test_the_command_prints_a_table() -> None:
    given = ("--flops", "100", "--link-bandwidth", "2", "--link-latency", "30", "--training")
    result = run("--ranks", "2,4", "--ranks", "16", *SMALL, *given)
    assert result.exit_code == 0, result.output
    call = CallSpec(Hq=8, Lq=4096, D=64, mask=M.Causal())
    table = cost.ranks_table(call, (2, 4, 16), flops=1e11, link=cost.RankLink(2e9, 30e-6), passes="training")
    assert result.output == f"{table}\n"
    lines = result.output.splitlines()
    assert "100 GFLOP/s, link of 2 GB/s in each direction and 30 us per message" in lines[1]
    methods = ["ring", "gather", "ulysses", *["ring", "gather", "ulysses", "usp"], "ring", "gather", "usp"]
    assert [line.split()[1] for line in lines[3:-1]] == methods
    assert [sum("*" in line for line in part) for part in (lines[3:6], lines[6:10], lines[10:13])] == [1] * 3


def test_the_command_prints_json() -> None:
    result = run("--ranks", "2,16", *SMALL, "--window", "100", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert (data["flops"], data["passes"], data["link"]["latency"]) == (5e12, "forward", 50e-6)
    call = CallSpec(Hq=8, Lq=4096, D=64, mask=M.sliding(100))
    costs = [x for ranks in (2, 16) for x in cost.over_ranks(call, ranks)]
    assert [x["total_bytes"] for x in data["costs"]] == [x.total_bytes for x in costs]
    assert [x["ranks"] for x in data["costs"]] == [x.ranks for x in costs]


@native
def test_the_command_takes_the_speed_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = cost.Machine(2, 1e11, ((1, 1e10),), 1e-6)
    monkeypatch.setattr(cost, "measure_machine", lambda: machine)
    result = run("--ranks", "2", *SMALL, "--time", "--sinks", "3", "--window", "9")
    assert result.exit_code == 0, result.output
    assert "a rank: 82 GFLOP/s" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2,x"], "--ranks: expected integers, as in 8,64, got 2,x"),
        (["--ranks", "0"], "ranks: expected an integer from 1"),
        (["--ranks", "2", "--kind", "linear"], "--ranks: expected no config, --kind"),
        (["--ranks", "2", "--past", "3"], "--ranks: expected no config, --kind"),
        (["--ranks", "2", "--compare"], "--ranks: expected no config, --kind"),
        (["--ranks", "2", "--time", "--flops", "3"], "--flops: expected only without --time"),
        (["--ranks", "2", "--link-bandwidth", "0"], "bandwidth: expected a positive number"),
        (["--training"], "--training: expected only with --ranks"),
        (["--link-latency", "3"], "--link-latency, --training: expected only with --ranks"),
    ],
)
def test_the_command_reports_wrong_options(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.output
