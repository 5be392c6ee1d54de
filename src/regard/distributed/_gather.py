"""Gather: each rank receives all keys and values that its queries may attend to.

A rank's queries are computed in windows that begin where the kernels' panels of the whole call
begin, so that each row's result is bitwise that of a single process. Rows of a window that other
ranks hold are zeros, and their results are dropped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._autograd.attention import run
from .._backends.dispatch import choose
from .._call.spec import compute_dtype
from ..masks import Mask
from ..masks._program import Op
from ._call import DistributedCall
from ._group import Group, swap
from ._pairs import Run
from ._travel import Schedule, local_rows
from .layouts import take

PANELS = 64  # rows: a multiple of every panel's rows, and more than the decode pass takes
MAX_STEP = 64  # larger dilations do not align windows


def gather(
    call: DistributedCall, groups: list[Group], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns this rank's shards of out and the LSE."""
    (group,) = groups
    k, v = Gathered.apply(Schedule(call, group), k, v)  # type: ignore[no-untyped-call]
    return on_windows(call, group, q, k, v)


def on_windows(
    call: DistributedCall, group: Group, q: Tensor, k: Tensor, v: Tensor, heads: Run | None = None
) -> tuple[Tensor, Tensor]:
    """Computes this rank's shards of out and the LSE, all or some heads, from keys of all ranks."""
    runs = call.q_layout.runs[group.rank]
    rows, results = local_rows(runs), []
    for window, inside in windows(runs, call.Lq, PANELS * _dilation(call.options.mask)):
        pieces = [q[:, :, rows[a]] if a in rows else q.new_zeros(*q.shape[:2], a[1] - a[0], q.shape[3])
                  for a in _cover(window, inside)]  # fmt: skip
        out, lse = attend(call, window, (0, call.Lk), torch.cat(pieces, 2), k, v, heads)
        local = [(begin - window[0], end - window[0]) for begin, end in inside]
        results.append((take(out, local, 2), take(lse, local, 2)))
    if not results:
        out, lse = attend(call, (0, 0), (0, call.Lk), q, k, v, heads)
        return out, lse
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


class Gathered(Function):
    """Maps a rank's keys and values, or its latents, to those of all ranks, (B, H, Lk, ...).

    Runs that no query of the rank may attend to are not sent, and are zeros. One Function for all
    tensors, always in the graph: the ranks exchange gradients in the same order.
    """

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.schedule = schedule
        return tuple(_all_runs(schedule, x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *Returned.apply(ctx.schedule, *grads)  # type: ignore[no-untyped-call]


class Returned(Function):
    """Maps the gradients of `Gathered` to those of this rank's keys and values, and is linear, too."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.schedule = schedule
        return tuple(_own_runs(schedule, grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *tensors: Tensor) -> tuple[Any, ...]:
        return None, *Gathered.apply(ctx.schedule, *tensors)  # type: ignore[no-untyped-call]


def _all_runs(schedule: Schedule, x: Tensor) -> Tensor:
    group, layout = schedule.group, schedule.call.k_layout
    rows = local_rows(layout.runs[group.rank])
    sends = []
    for receiver in range(group.size):
        runs = schedule.needed(receiver, group.rank)
        sends.append(take(x, [(rows[a].start, rows[a].stop) for a in runs], 2))
    needed = [schedule.needed(group.rank, owner) for owner in range(group.size)]
    whole = x.new_zeros(*x.shape[:2], layout.L, x.shape[3])
    for runs, received in zip(needed, swap(group, sends, _shapes(x, needed)), strict=True):
        for (begin, end), at in zip(runs, local_rows(tuple(runs)).values(), strict=True):
            whole[:, :, begin:end] = received[:, :, at]
    return whole


def _own_runs(schedule: Schedule, grad: Tensor) -> Tensor:
    """Returns the sum of all ranks' gradients of this rank's rows, in the order of the ranks."""
    group, layout = schedule.group, schedule.call.k_layout
    sends = [take(grad, schedule.needed(group.rank, owner), 2) for owner in range(group.size)]
    needed = [schedule.needed(receiver, group.rank) for receiver in range(group.size)]
    rows, n = local_rows(layout.runs[group.rank]), layout.lengths[group.rank]
    total = grad.new_zeros((*grad.shape[:2], n, grad.shape[3]), dtype=compute_dtype(grad.dtype))
    for runs, received in zip(needed, swap(group, sends, _shapes(grad, needed)), strict=True):
        for a, at in local_rows(tuple(runs)).items():
            total[:, :, rows[a]] += received[:, :, at]
    return total.to(grad.dtype)


def _shapes(x: Tensor, runs: list[list[Run]]) -> list[tuple[int, ...]]:
    return [(*x.shape[:2], sum(end - begin for begin, end in own), x.shape[3]) for own in runs]


def attend(
    call: DistributedCall, queries: Run, keys: Run, q: Tensor, k: Tensor, v: Tensor, heads: Run | None = None
) -> tuple[Tensor, Tensor]:
    """Computes out and the LSE of a rectangle, which draws the dropout pattern of the whole call."""
    options = call.part(queries, keys, heads)._replace(return_lse=True)
    problem = call.problem(queries, keys, q, k, v, options, heads)
    name = choose(problem, call.impl)
    if name == "torch" and options.dropout:
        raise NotImplementedError(
            "impl: expected 'native' or 'reference' with dropout, which draw one pattern on all ranks, "
            "got 'torch'"
        )
    out, lse = run(problem, name)
    assert lse is not None
    return out, lse


def windows(runs: tuple[Run, ...], L: int, align: int) -> list[tuple[Run, list[Run]]]:
    """Returns aligned windows [begin, end) that cover the runs, each with the runs inside it."""
    result: list[tuple[Run, list[Run]]] = []
    for begin, end in runs:
        first, last = begin // align * align, min(-(-end // align) * align, L)
        if last == L and last - first < align:  # a short window would take another kernel
            first = max(first - align, 0)
        if result and first < result[-1][0][1]:
            result[-1] = ((result[-1][0][0], last), [*result[-1][1], (begin, end)])
        else:
            result.append(((first, last), [(begin, end)]))
    return result


def _cover(window: Run, runs: list[Run]) -> list[Run]:
    """Returns the runs and the gaps between them that make up the window."""
    cover, position = [], window[0]
    for begin, end in runs:
        cover += [(position, begin)] if begin > position else []
        cover.append((begin, end))
        position = end
    return cover + ([(position, window[1])] if window[1] > position else [])


def _dilation(mask: object) -> int:
    """Returns a multiple of the mask's dilations, or 1 if that is large."""
    assert mask is None or isinstance(mask, Mask)
    steps = set() if mask is None else _steps(mask)
    step = math.lcm(*steps) if steps else 1
    return step if step <= MAX_STEP else 1


def _steps(mask: Mask) -> set[int]:
    own = {mask.step} if mask._op is Op.DILATED else set()  # type: ignore[attr-defined]
    return own.union(*(_steps(child) for child in mask._children()))
