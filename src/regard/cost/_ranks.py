"""`over_ranks`: bytes, messages, seconds and memory of attention over processes."""

from __future__ import annotations

from typing import Literal, get_args

from .._tools.arguments import count, describe
from ..distributed import Layout, contiguous, zigzag
from ..masks import Causal
from ._call import CallSpec
from ._methods import (
    RankLink,
    Ranks,
    RanksCost,
    Sizes,
    check_rate,
    cost_in_groups,
    cost_of_gather,
    heads_suffice,
)
from ._steps import Steps

RankPass = Literal["forward", "training"]
FLOPS = 5e12  # of a rank: about 64 cores
MOST_TOKENS = 2**31  # numbers of pairs are int64
MOST_RANKS = 2**13  # two integers for each pair of ranks: 1 GiB


def over_ranks(
    call: CallSpec, ranks: int, *, layout: Layout | None = None, flops: float = FLOPS,
    link: RankLink | None = None, passes: RankPass = "forward",
) -> tuple[RanksCost, ...]:  # fmt: skip
    """Predicts the costs of self-attention over processes for each method that can run it.

    The methods are "ring", "gather", "ulysses" and, of all meshes for "usp", the fastest.

    Args:
        call: the call in one process. Its mask is the same for all samples and heads.
        ranks: number of processes, at most 8,192. With a mask that is no `Window`, about 128.
        layout: as in `distributed.attention`. Default: `zigzag` for `Causal()`, else `contiguous`.
        flops: FLOP/s that the kernels of a rank reach.
        link: bandwidth and latency of a rank's link. Default: `RankLink()`.
        passes: "forward", or "training" (forward and backward).

    Example:
        >>> call = CallSpec(Hq=32, Hkv=8, Lq=1_000_000, D=128, dtype=torch.bfloat16, mask=Causal())
        >>> [(cost.method, cost.seconds) for cost in over_ranks(call, 64)]
    """
    layout = _checked(call, ranks, layout, flops, passes)
    D, Dv = call.D, call.Dv or call.D
    pair_flops = (2 * call.B * (D + Dv), 2 * call.B * (3 * D + 2 * Dv))[: 1 + (passes == "training")]
    division = Ranks(Sizes.of(call), layout, link or RankLink(), tuple(n / flops for n in pair_flops))
    steps = Steps.of(call.mask, layout)
    costs = [cost_in_groups(division, 1, steps), cost_of_gather(division, steps)]
    for_usp: list[RanksCost] = []
    for inner in (n for n in range(2, ranks + 1) if ranks % n == 0 and heads_suffice(division, n)):
        cost = cost_in_groups(division, inner, Steps.of(call.mask, layout.grouped(inner)))
        (costs if inner == ranks else for_usp).append(cost)
    return (*costs, *sorted(for_usp, key=lambda cost: cost.seconds)[:1])


def _checked(call: CallSpec, ranks: int, layout: Layout | None, flops: float, passes: str) -> Layout:
    """Checks the arguments of `over_ranks`. Returns the layout."""
    call._problem()  # checks the sizes
    check_rate("flops", flops)
    if passes not in get_args(RankPass):
        raise ValueError(f"passes: expected one of {', '.join(get_args(RankPass))}, got {passes!r}")
    if call.Lk not in (None, call.Lq) or call.bias is not None or call.shared:
        raise ValueError("call: expected self-attention without bias and shared, got another call")
    if call.Lq > MOST_TOKENS:
        raise ValueError(f"call: expected at most {MOST_TOKENS:,} tokens, got Lq = {call.Lq:,}")
    if count("ranks", ranks, 1) > (most := min(call.Lq, MOST_RANKS)):
        raise ValueError(f"ranks: expected at most {most:,}, for {call.Lq:,} tokens, got {ranks:,}")
    if layout is None:
        return (zigzag if call.mask == Causal() else contiguous)(call.Lq, ranks)
    if not isinstance(layout, Layout) or (layout.L, layout.ranks) != (call.Lq, ranks):
        got = f"{layout.ranks} and {layout.L}" if isinstance(layout, Layout) else describe(layout)
        raise ValueError(f"layout: expected a Layout of {ranks} ranks and {call.Lq} tokens, got {got}")
    return layout
