"""Pairs and bytes of each rank and step, and the choice of the method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._backends.dispatch import runs_kernels
from .._call.check import as_mask, as_offset
from .._call.spec import Options
from ..masks import Mask
from ._call import DistributedCall
from ._group import Group
from ._travel import Schedule
from ._ulysses import HINT, head_shares
from .layouts import Layout

METHODS = ("auto", "ring", "gather", "ulysses", "usp")
FLOPS_PER_BYTE = 32  # of a rank, in the choice of the method: 2 GB/s beside 64 GFLOP/s


@dataclass(frozen=True)
class DistributedPlan:
    """What each rank of a method computes and receives in the forward pass.

    `pairs[rank][step]` counts visible (query, key) pairs over samples and heads, `bytes[rank][step]`
    the bytes that the rank receives before the step. `gather` and `ulysses` have one step.
    """

    method: str
    layout: Layout
    pairs: tuple[tuple[int, ...], ...]
    bytes: tuple[tuple[int, ...], ...]

    @property
    def balance(self) -> float:
        """The visible pairs of the slowest rank, divided by the mean of all ranks."""
        totals = [sum(steps) for steps in self.pairs]
        return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0

    @property
    def total_bytes(self) -> int:
        return sum(map(sum, self.bytes))

    def __str__(self) -> str:
        head = f"{self.method}: {self.layout.L:,} tokens on {self.layout.ranks} ranks"
        lines = [f"{head}, slowest rank {self.balance:.3f} x the mean, {self.total_bytes:,} bytes sent"]
        lines.append(f"{'rank':>4} {'tokens':>10} {'pairs':>16} {'bytes':>14}  pairs of each step")
        for rank, (pairs, size) in enumerate(zip(self.pairs, self.bytes, strict=True)):
            steps = " ".join(f"{n:,}" for n in pairs)
            tokens = self.layout.lengths[rank]
            lines.append(f"{rank:>4} {tokens:>10,} {sum(pairs):>16,} {sum(size):>14,}  {steps}")
        return "\n".join(lines)


def plan(
    layout: Layout, *, mask: Mask | None = None, offset: int | None = None, method: str = "auto", B: int = 1,
    Hq: int = 1, Hkv: int | None = None, D: int = 64, Dv: int | None = None, latent: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DistributedPlan:  # fmt: skip
    """Returns pairs and bytes of each rank and step of a call, without tensors or processes.

    Args:
        layout, mask, offset, method: as in `distributed.attention`. `usp` is a combination of the
            plans of "ring" and "ulysses".
        B, Hq, Hkv, D, Dv, dtype: the sizes and the dtype of the call. Defaults: Hkv = Hq, Dv = D.
        latent: rank + rope, the channels of the latents that travel in `distributed.latent_attention`
            instead of keys and values.

    Example:
        >>> print(regard.distributed.plan(layout, mask=masks.Causal(), Hq=8))
    """
    options = Options(as_mask(mask), as_offset(offset))
    call = DistributedCall(options, layout, layout, B, Hq, Hq if Hkv is None else Hkv, "auto", latent=latent)
    width = (D, D if Dv is None else Dv)
    if method == "auto":
        method = _cheapest(call, width, dtype.itemsize, torch.device("cpu"))
    if method not in PLANS:
        raise ValueError(f"method: expected one of auto, {', '.join(PLANS)}, got {method!r}")
    return PLANS[method](call, width, dtype.itemsize)


def choose_method(call: DistributedCall, groups: list[Group], q: Tensor, v: Tensor) -> str:
    """Returns the method for `method="auto"`, the same on all ranks."""
    if len(groups) == 2:
        return "usp"
    if groups[0].size == 1:
        return "gather"
    return _cheapest(call, (q.shape[3], v.shape[3]), q.dtype.itemsize, q.device)


def _cheapest(call: DistributedCall, width: tuple[int, int], itemsize: int, device: torch.device) -> str:
    names = ["ring" if runs_kernels(call.impl, device) else "gather"]
    if call.Hq >= call.q_layout.ranks and _heads_divide(call):
        names.append("ulysses")
    return min(names, key=lambda name: _cost(PLANS[name](call, width, itemsize), sum(width)))


def _cost(plan: DistributedPlan, width: int) -> int:
    """Returns the FLOPs of the slowest rank, with the bytes it receives converted to FLOPs."""
    return max(
        2 * width * sum(pairs) + FLOPS_PER_BYTE * sum(size)
        for pairs, size in zip(plan.pairs, plan.bytes, strict=True)
    )


def _heads_divide(call: DistributedCall) -> bool:
    try:
        return bool(head_shares(call.Hq, call.Hkv, call.q_layout.ranks))
    except ValueError:
        return False


def _ring(call: DistributedCall, width: tuple[int, int], itemsize: int) -> DistributedPlan:
    ranks, counter = call.q_layout.ranks, call.counter()
    pairs, sizes = [], []
    for rank in range(ranks):
        schedule = Schedule(call, Group(None, rank, ranks))
        row = call.B * (call.latent or call.Hkv * sum(width)) * itemsize
        needed = [schedule.needed(rank, schedule.owner(step)) for step in range(ranks)]
        queries = call.q_layout.runs[rank]
        pairs.append(tuple(sum(counter.pairs(q, k) for q in queries for k in runs) for runs in needed))
        sizes.append((0, *(row * sum(b - a for a, b in runs) for runs in needed[1:])))
    return DistributedPlan("ring", call.q_layout, tuple(pairs), tuple(sizes))


def _gather(call: DistributedCall, width: tuple[int, int], itemsize: int) -> DistributedPlan:
    ring = _ring(call, width, itemsize)
    return DistributedPlan(
        "gather", call.q_layout, tuple((sum(x),) for x in ring.pairs), tuple((sum(x),) for x in ring.bytes)
    )


def _ulysses(call: DistributedCall, width: tuple[int, int], itemsize: int) -> DistributedPlan:
    shares = head_shares(call.Hq, call.Hkv, call.q_layout.ranks, HINT)
    per_head = call.counter().total // call.Hq
    D, Dv = width
    pairs, sizes = [], []
    for rank, ((a, b), (c, d)) in enumerate(shares):
        others = call.q_layout.L - call.q_layout.lengths[rank]
        keys = call.k_layout.L - call.k_layout.lengths[rank]
        values = others * (b - a) * D + keys * (call.latent or (d - c) * (D + Dv))
        rows = call.q_layout.lengths[rank] * (call.Hq - (b - a))
        lse = rows * max(itemsize, 4)  # float32 for 16-bit inputs
        pairs.append(((b - a) * per_head,))
        sizes.append((call.B * ((values + rows * Dv) * itemsize + lse),))
    return DistributedPlan("ulysses", call.q_layout, tuple(pairs), tuple(sizes))


PLANS: dict[str, Callable[[DistributedCall, tuple[int, int], int], DistributedPlan]] = {
    "ring": _ring, "gather": _gather, "ulysses": _ulysses,
}  # fmt: skip
