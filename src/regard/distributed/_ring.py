"""Ring attention: keys and values travel, and so do their gradients.

The results of the rectangles (query run x key run) are merged by their softmax statistics. Backward
repeats the steps of forward (`_travel.py`): the kernels get the merged statistics, and the gradients
of keys and values go back to their owner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._backends.native import attention as native
from .._call.layout import ordered_like
from .._call.spec import compute_dtype
from ..scores import Alibi, RelativeBias
from ._call import DistributedCall, bias_of_heads, of_heads
from ._group import Group, all_headers, refuse_second_derivatives
from ._ring_backward import RingBackward
from ._travel import Part, Schedule, Travel, local_rows, parts

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LOWEST = -1e30  # the shift of rows without keys: 2 ** (LOWEST - shift) is 0


class Accumulator:
    """Merges the results of rectangles with the same queries, in the dtype of the LSE.

    `stats` (2, B, H, n), each row's shift and softmax sum, receives the merged statistics.
    """

    def __init__(self, q: Tensor, Dv: int, stats: Tensor) -> None:
        self.out = q.new_zeros((*q.shape[:3], Dv), dtype=stats.dtype)
        self.shift, self.total = stats
        self.shift.fill_(LOWEST)
        self.total.zero_()
        self.overflows = False

    def add(self, rows: slice, out: Tensor, residual: Tensor | None, shift: Tensor, total: Tensor) -> None:
        self.overflows |= bool((total < 0).any())
        old, old_total = self.shift[:, :, rows], self.total[:, :, rows]
        shift = torch.where(total == 0, LOWEST, shift)
        top = torch.maximum(old, shift)
        before, after = old_total * torch.exp2(old - top), total * torch.exp2(shift - top)
        both = before + after
        safe = torch.where(both == 0, 1.0, both)
        part = out.to(self.out.dtype) if residual is None else out.to(self.out.dtype).add_(residual)
        whole = self.out[:, :, rows]
        whole.mul_((before / safe)[..., None]).addcmul_(part, (after / safe)[..., None])
        self.shift[:, :, rows], self.total[:, :, rows] = top, both

    def add_sink(self, sink: Tensor) -> None:
        """Adds the sink (H,), a key with a value of zeros."""
        logits = sink.to(self.total.dtype)[None, :, None].expand_as(self.total) * LOG2_E
        shift = logits.ceil().clamp_min(LOWEST)  # of a sink -inf, which adds nothing
        zeros = self.out.new_zeros(()).expand_as(self.out)
        self.add(slice(None), zeros, None, shift, torch.exp2(logits - shift))


class Ring(Function):
    """Maps a rank's shards (q, k, v, bias, by_head, sink) to its shards of out and the LSE."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, groups: list[Group], *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, *_, _sink = inputs
        shape = (*q.shape[:3], v.shape[3])
        out = q.new_empty_strided(shape, ordered_like(q.stride(), shape))
        residual = torch.empty_like(out) if q.dtype.itemsize == 2 else None
        stats = q.new_empty((2, *shape[:3]), dtype=compute_dtype(q.dtype))
        divided, overflows = parts(schedule, k, v), False
        travel = Travel(divided, k, v)
        for part in divided:
            result = _part(part, travel, inputs, stats)
            overflows |= result.overflows
            rounded = out[:, part.heads].copy_(result.out)
            if residual is not None:
                residual[:, part.heads] = result.out - rounded
        _check_overflow(groups, overflows)
        lse = _lse(stats)
        ctx.schedule = schedule
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, out, residual, stats, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivatives("method='ring'")
        saved = ctx.saved_tensors
        dout = torch.zeros_like(saved[6]) if dout is None else dout
        return None, None, *RingBackward(ctx.schedule, saved, dout, dlse, ctx.needs_input_grad[2:]).run()


def _part(part: Part, travel: Travel, inputs: tuple[Any, ...], stats: Tensor) -> Accumulator:
    """Computes the merged result of a part and writes its statistics to `stats`."""
    q, _, v, bias, by_head, sink = inputs
    schedule, heads = part.schedule, part.heads
    q, bias, by_head = q[:, heads], bias_of_heads(bias, heads), of_heads(by_head, heads)
    result = Accumulator(q, v.shape[3], stats[:, :, heads])
    rows = local_rows(schedule.call.q_layout.runs[schedule.group.rank])
    for block in travel.blocks(part):
        for keys, at in block.pieces():
            for run in schedule.queries(keys):
                p = schedule.call.rectangle(
                    run, keys, q[:, :, rows[run]], block.k[:, :, at], block.v[:, :, at], bias, by_head
                )
                out, _, (shift, total), residual = native.forward_saving(p)
                result.add(rows[run], out, residual, shift, total)
    if sink is not None:
        result.add_sink(sink[heads])
    return result


def _check_overflow(groups: list[Group], overflows: bool) -> None:
    """Raises on all ranks of the groups if a score of one rank overflows."""
    for group in groups:
        overflows = any(flag for (flag,) in all_headers(group, [overflows]))
    if overflows:
        raise FloatingPointError(
            "q, k: expected scores in the range of the compute type on all ranks with method='ring', got "
            "larger ones, whose partial results cannot be merged; use method='gather' or 'ulysses'"
        )


def _lse(stats: Tensor) -> Tensor:
    shift, total = stats
    lse: Tensor = (shift * LN_2).add_(total.log())
    return lse.masked_fill_(total == 0, -torch.inf)


def ring(
    call: DistributedCall, groups: list[Group], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns this rank's shards of out and the LSE.

    The ranks of the first group form the ring. The others are the groups of the other mesh dims.
    """
    bias = call.options.bias
    by_head = None
    if isinstance(bias, Alibi):
        by_head = bias.slopes.to(compute_dtype(q.dtype)).contiguous()
    elif isinstance(bias, RelativeBias):
        far = bias.max_distance
        by_head = bias.in_dtype(compute_dtype(q.dtype)).by_distance(-far, far)
    tensor = bias if isinstance(bias, Tensor) else None
    inputs = (q, k, v, tensor, by_head, call.options.sink)
    return Ring.apply(Schedule(call, groups[0]), groups, *inputs)  # type: ignore[no-any-return,no-untyped-call]
