"""`ranks_table`: the costs of attention over several numbers of processes, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ._call import CallSpec
from ._methods import RankLink, RanksCost
from ._ranks import FLOPS, RankPass, over_ranks
from ._table import aligned, short

HEADS = (
    "ranks", "method", "received, GB", "messages", "compute, s", "communication, s", "total, s", "memory, GB"
)  # fmt: skip


@dataclass(frozen=True)
class RanksTable:
    """The costs of a call over several numbers of processes. Its text marks the fastest methods."""

    call: CallSpec
    flops: float
    link: RankLink
    passes: RankPass
    costs: tuple[tuple[RanksCost, ...], ...]  # for each number of processes

    @property
    def title(self) -> str:
        call, link = self.call, self.link
        heads = f"{call.Hq} query heads and {call.Hkv or call.Hq} key heads of {call.D} channels"
        dtype = str(call.dtype).removeprefix("torch.")
        return (
            f"{call.B} x {call.Lq:,} tokens, {dtype}, {heads}, mask {call.mask!r}, {self.passes}\n"
            f"a rank: {self.flops / 1e9:,.0f} GFLOP/s, link of {link.bandwidth / 1e9:g} GB/s in each "
            f"direction and {link.latency * 1e6:g} us per message"
        )

    def __str__(self) -> str:
        lines = [list(HEADS)]
        for costs in self.costs:
            fastest = min(costs, key=lambda cost: cost.seconds)
            lines += [_texts(cost, cost is fastest) for cost in costs]
        return "\n".join([self.title, *aligned(lines, left=1), "* the fastest method of a number of ranks"])

    def to_json(self) -> str:
        costs = [{"ranks": cost.ranks, **asdict(cost)} for costs in self.costs for cost in costs]
        speed = {"flops": self.flops, "link": asdict(self.link), "passes": self.passes}
        return json.dumps({"title": self.title, **speed, "costs": costs}, indent=2)


def _texts(cost: RanksCost, is_fastest: bool) -> list[str]:
    method = f"usp {cost.mesh[0]} x {cost.mesh[1]}" if cost.method == "usp" else cost.method
    total = short(cost.seconds) + ("*" if is_fastest else " ")
    return [
        f"{cost.ranks:,}", method, short(cost.received_bytes / 1e9), f"{cost.messages:,}",
        short(cost.compute), short(cost.communication), total, short(cost.memory_bytes / 1e9),
    ]  # fmt: skip


def ranks_table(
    call: CallSpec, ranks: Iterable[int], *, flops: float = FLOPS, link: RankLink | None = None,
    passes: RankPass = "forward",
) -> RanksTable:  # fmt: skip
    """Compares the methods for several numbers of processes. The arguments are those of `over_ranks`.

    Example:
        >>> print(ranks_table(CallSpec(Hq=8, Lq=65536, mask=masks.Causal()), [8, 64]))
    """
    link = link or RankLink()
    costs = tuple(over_ranks(call, n, flops=flops, link=link, passes=passes) for n in ranks)
    if not costs:
        raise ValueError("ranks: expected at least one number, got none")
    return RanksTable(call, flops, link, passes, costs)
