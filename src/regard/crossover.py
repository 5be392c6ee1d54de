"""Crossovers: the lengths above which an approximation beats exact attention in time or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from . import nn
from ._api.attention import attention
from ._api.linear_attention import linear_attention
from ._tools.arguments import count
from ._tools.measuring import best_times, peak_memory
from .masks import Causal, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Work = Literal["forward", "training"]
Quantity = Literal["time", "memory"]
KINDS: list[tuple[Work, Quantity]] = list(product(get_args(Work), get_args(Quantity)))
EXACT, CLEAR, RESOLUTION = "exact", 1.1, 2**20
NEIGHBOURS, GLOBALS, BLOCK, RANK, FEATURES = 256, 8, 64, 256, 256


class Measurement(NamedTuple):
    """Time and peak memory of exact attention or of one approximation, at one length."""

    mechanism: str  # "exact", or the name of an approximation, such as "window"
    work: Work
    L: int
    time: float  # seconds
    memory: int | None  # peak bytes beyond q, k and v; None if the system does not report it


@dataclass(frozen=True)
class Crossover:
    """The result of `measure`: the measurements, and methods that compare them."""

    points: tuple[Measurement, ...]

    @property
    def lengths(self) -> list[int]:
        """The measured lengths, ascending."""
        return sorted({point.L for point in self.points})

    @property
    def mechanisms(self) -> list[str]:
        """The names of the approximations, in the order measured."""
        return [name for name in dict.fromkeys(point.mechanism for point in self.points) if name != EXACT]

    def curve(self, mechanism: str, work: Work, quantity: Quantity) -> dict[int, float]:
        """Maps each measured length to the mechanism's time in seconds or memory in bytes.

        The dict is empty if the quantity was not measured.
        """
        points = [p for p in self.points if (p.mechanism, p.work) == (mechanism, work)]
        if quantity == "time":
            return {p.L: p.time for p in points}
        return {p.L: p.memory for p in points if p.memory is not None}

    def gains(self, mechanism: str, work: Work, quantity: Quantity) -> dict[int, float]:
        """Maps each measured length to exact attention's time or memory divided by the mechanism's.

        The ratio is above 1 where the mechanism takes less time or memory than exact attention.
        """
        curve, exact = (self.curve(name, work, quantity) for name in (mechanism, EXACT))
        return {L: amount / curve[L] for L, amount in exact.items()}

    def first(self, mechanism: str, work: Work, quantity: Quantity) -> int | None:
        """Returns the crossover: the shortest length with a gain of at least 1.1, or None.

        The gain (see `gains`) must also be at least 1.1 at every longer length that was measured.
        """
        crossover = None
        for L, gain in sorted(self.gains(mechanism, work, quantity).items(), reverse=True):
            if gain < CLEAR:
                break
            crossover = L
        return crossover

    def verdict(self, mechanism: str, work: Work, quantity: Quantity) -> str:
        """Returns the crossover as text, such as "from 4,096 on (3.2 x)".

        The number in parentheses is the gain at the longest length: the time or memory of exact
        attention divided by the mechanism's.
        """
        gains = self.gains(mechanism, work, quantity)
        if not gains:
            return "not measured"
        longest, first = max(gains), self.first(mechanism, work, quantity)
        when = f"never up to {longest:,}" if first is None else f"from {first:,} on"
        return f"{when} ({gains[longest]:.3g} x)"

    def plot(self, path: str | None = None) -> Figure:
        """Plots time and memory of forward and training against length. Needs the extra `plot`."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 7), layout="constrained")
        for axes, (work, quantity) in zip(figure.subplots(2, 2).flat, KINDS, strict=True):
            for name in (EXACT, *self.mechanisms):
                curve = self.curve(name, work, quantity)
                style = {"color": "black", "linewidth": 2.5} if name == EXACT else {}
                axes.plot(list(curve), list(curve.values()), marker=".", label=name, **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{quantity}, {work}")
            axes.set_xlabel("tokens")
            axes.set_ylabel("seconds" if quantity == "time" else "bytes")
        figure.axes[0].legend(fontsize=8)
        if path is not None:
            figure.savefig(path, dpi=80)
        return figure


def measure(
    lengths: Sequence[int], *, causal: bool = False, heads: int = 8, dim: int = 64, seconds: float = 1.0,
    progress: Callable[[str], None] = lambda step: None,
) -> Crossover:  # fmt: skip
    """Measures time and peak memory of exact attention and of its approximations.

    The approximations are a window, Performer and linear attention, and without `causal` also
    Longformer, BigBird and Linformer. Projections are not measured. All times are measured first,
    then the memory, if the system reports it.

    Args:
        lengths: lengths L to measure. q, k and v are (1, heads, L, dim) float32.
        causal: whether attention is causal. If True, approximations without a causal form are left
            out.
        heads, dim: H and D.
        seconds: how long to time the forward passes at each length, and then the training steps.
            Every call runs at least twice.
        progress: called with a description of each step before it starts.
    """
    jobs = [(count("lengths", L, 1), work) for L in sorted(set(lengths)) for work in get_args(Work)]
    times, peaks = {}, {}
    for L, work in jobs:
        progress(f"time, {work}, {L:,} tokens")
        times[L, work] = best_times(dict(_calls(L, work, causal, heads, dim)), seconds, least=2)
    for L, work in jobs:
        progress(f"memory, {work}, {L:,} tokens")
        peaks[L, work] = {name: _peak(call) for name, call in _calls(L, work, causal, heads, dim)}
    return Crossover(
        tuple(
            Measurement(name, work, L, time, peaks[L, work][name])
            for L, work in jobs
            for name, time in times[L, work].items()
        )
    )


def _peak(call: Callable[[], object]) -> int | None:
    """Returns the peak memory of a call in bytes, beyond the memory of q, k and v.

    Measures the second of two calls, because the first also loads code. Returns at least 1 MiB,
    because the system reports memory in coarse steps, or None if it does not report memory.
    """
    peak_memory(call)
    peak = peak_memory(call)
    return None if peak is None else max(peak, RESOLUTION)


def _calls(
    L: int, work: Work, causal: bool, heads: int, dim: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, L, dim, generator=generator) for _ in range(4))
    for name, attend in _mechanisms(L, causal, heads, dim).items():
        yield name, partial(_forward if work == "forward" else _training, attend, q, k, v, dout)


@torch.no_grad()
def _forward(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensor:
    return attend(q, k, v)


def _training(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attend(*leaves), leaves, dout)


def _mechanisms(L: int, causal: bool, heads: int, dim: int) -> dict[str, Attend]:
    mask = Causal() if causal else None
    window = Window(NEIGHBOURS, 0 if causal else NEIGHBOURS)
    width = heads * dim
    both_ways: dict[str, Attend] = {
        EXACT: partial(attention, mask=mask),
        "window": partial(attention, mask=window),
        "performer": nn.PerformerAttention(
            width, heads, features=FEATURES, causal=causal, redraw=None, seed=0
        ).attend,
        "linear": partial(linear_attention, causal=causal, feature_map="elu+1", normalize=True),
    }
    if causal:
        return both_ways
    longformer = nn.LongformerAttention(width, heads, window=(NEIGHBOURS, NEIGHBOURS))
    return both_ways | {
        "longformer": partial(longformer.attend, global_tokens=range(min(GLOBALS, L))),
        "bigbird": nn.BigBirdAttention(width, heads, block=BLOCK).attend,
        "linformer": nn.LinformerAttention(width, heads, nn.LinformerProjection(L, RANK)).attend,
    }
