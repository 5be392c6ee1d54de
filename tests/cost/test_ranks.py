"""Costs of attention over processes: against `distributed.plan` and against counted bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import cost, distributed as D, masks as M
from regard.cost import CallSpec
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
SPEED: dict[str, Any] = {"flops": 1e12, "link": cost.Link(1e9, 1e-4)}


def by_method(call: CallSpec, ranks: int, **options: Any) -> dict[str, cost.RanksCost]:
    return {x.method: x for x in cost.over_ranks(call, ranks, **options)}


@native
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bytes_and_pairs_are_those_of_the_plan(
    name: str, ranks: int, layout: str, dtype: torch.dtype
) -> None:
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
