"""Ring attention: keys and values travel, and so do their gradients.

In step s, a rank receives the keys of rank (rank - s) mod R from their owner and computes while the
keys of step s + 1 travel. Only runs of keys that some query of the receiver may attend to are sent.
The results of the rectangles (query run x key run) are merged by their softmax statistics. Backward
repeats the steps: the kernels get the merged statistics, and the gradients of keys and values go
back to their owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._backends.native import attention as native
from .._call.layout import ordered_like
from .._call.spec import Problem, compute_dtype
from ..scores import Alibi, RelativeBias
from ._call import DistributedCall, sliced
from ._group import Group, Transfer, start
from ._pairs import Run
from .layouts import take

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LOWEST = -1e30  # the shift of rows without keys: 2 ** (LOWEST - shift) is 0


class Schedule(NamedTuple):
    """Which rectangles a rank computes and which runs of keys travel."""

    call: DistributedCall
    group: Group

    def needed(self, receiver: int, owner: int) -> list[Run]:
        """Returns the owner's runs of keys that some query of the receiver may attend to."""
        counter, queries = self.call.counter(), self.call.q_layout.runs[receiver]
        return [k for k in self.call.k_layout.runs[owner] if any(counter.visible(q, k) for q in queries)]

    def queries(self, keys: Run) -> list[Run]:
        """Returns this rank's runs of queries that may attend to some of the keys."""
        counter = self.call.counter()
        return [q for q in self.call.q_layout.runs[self.group.rank] if counter.visible(q, keys)]

    def owner(self, step: int) -> int:
        return (self.group.rank - step) % self.group.size

    def receiver(self, step: int) -> int:
        return (self.group.rank + step) % self.group.size


class KeyBlock(NamedTuple):
    """Runs of keys of one owner, concatenated: k (B, Hkv, n, D) and v (B, Hkv, n, Dv)."""

    runs: list[Run]
    k: Tensor
    v: Tensor

    def pieces(self) -> Iterator[tuple[Run, slice]]:
        """Yields each run and its rows in the block."""
        begin = 0
        for run in self.runs:
            yield run, slice(begin, begin := begin + run[1] - run[0])


def local_rows(runs: tuple[Run, ...]) -> dict[Run, slice]:
    """Maps each run to its rows in the rank's shard."""
    rows, begin = {}, 0
    for run in runs:
        rows[run] = slice(begin, begin := begin + run[1] - run[0])
    return rows


def blocks(schedule: Schedule, k: Tensor, v: Tensor) -> Iterator[KeyBlock]:
    """Yields the block of each step. The next block travels while the caller uses one."""
    group, own = schedule.group, schedule.call.k_layout.runs[schedule.group.rank]
    rows = local_rows(own)
    yield KeyBlock(list(own), k, v)
    following = _request(schedule, 1, k, v, rows)
    for step in range(1, group.size):
        block, transfer = following
        transfer.wait()
        following = _request(schedule, step + 1, k, v, rows) if step + 1 < group.size else following
        yield block


def _request(
    schedule: Schedule, step: int, k: Tensor, v: Tensor, rows: dict[Run, slice]
) -> tuple[KeyBlock, Transfer]:
    """Starts sending this rank's keys and receiving those of the step's owner."""
    group = schedule.group
    if step >= group.size:
        return KeyBlock([], k, v), Transfer(group, [], [], [])
    owner, receiver = schedule.owner(step), schedule.receiver(step)
    runs = schedule.needed(group.rank, owner)
    n = sum(end - begin for begin, end in runs)
    block = KeyBlock(runs, *(x.new_empty(*x.shape[:2], n, x.shape[3]) for x in (k, v)))
    sent = [(rows[run].start, rows[run].stop) for run in schedule.needed(receiver, group.rank)]
    sends = [(receiver, take(x, sent, 2).contiguous()) for x in (k, v)]
    return block, start(group, sends, [(owner, block.k), (owner, block.v)])


class Accumulator:
    """Merges the results of rectangles with the same queries, in the dtype of the LSE."""

    def __init__(self, q: Tensor, Dv: int) -> None:
        dtype, rows = compute_dtype(q.dtype), q.shape[:3]
        self.out = q.new_zeros((*rows, Dv), dtype=dtype)
        self.shift = q.new_full(rows, LOWEST, dtype=dtype)
        self.total = q.new_zeros(rows, dtype=dtype)

    def add(self, rows: slice, out: Tensor, residual: Tensor | None, shift: Tensor, total: Tensor) -> None:
        if bool((total < 0).any()):
            raise FloatingPointError(
                "regard.distributed: expected scores in the range of the compute type, got larger ones, "
                "whose partial results the ring cannot merge; use method='gather' or 'ulysses'"
            )
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
        """Adds the sink (Hq,), a key with a value of zeros."""
        logits = sink.to(self.total.dtype)[None, :, None].expand_as(self.total) * LOG2_E
        shift = logits.ceil()
        zeros = self.out.new_zeros(()).expand_as(self.out)
        self.add(slice(None), zeros, None, shift, torch.exp2(logits - shift))

    def lse(self) -> Tensor:
        lse = self.shift * LN_2 + self.total.log()
        return lse.masked_fill_(self.total == 0, -torch.inf)


class Ring(Function):
    """Maps a rank's shards (q, k, v, bias, by_head, sink) to its shards of out and the LSE."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, bias, by_head, sink = inputs
        result = Accumulator(q, v.shape[3])
        rows = local_rows(schedule.call.q_layout.runs[schedule.group.rank])
        for block in blocks(schedule, k, v):
            for keys, at in block.pieces():
                for run in schedule.queries(keys):
                    p = schedule.call.rectangle(
                        run, keys, q[:, :, rows[run]], block.k[:, :, at], block.v[:, :, at], bias, by_head
                    )
                    out, _, stats, residual = native.forward_saving(p)
                    result.add(rows[run], out, residual, *stats)
        if sink is not None:
            result.add_sink(sink)
        out, residual = _rounded(q, result.out)
        lse = result.lse()
        ctx.schedule = schedule
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, by_head, sink, out, residual, result.shift, result.total, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        dout = torch.zeros_like(saved[6]) if dout is None else dout
        return None, *RingBackward(ctx.schedule, saved, dout, dlse, ctx.needs_input_grad[1:]).run()


def _rounded(q: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns out in q's dtype and memory order, and its rounding error if the dtype has 16 bits."""
    rounded = q.new_empty_strided(out.shape, ordered_like(q.stride(), tuple(out.shape))).copy_(out)
    return rounded, (out - rounded).to(q.dtype) if q.dtype.itemsize == 2 else None


class RingBackward:
    """The backward pass of `Ring`."""

    def __init__(
        self, schedule: Schedule, saved: tuple[Any, ...], dout: Tensor, dlse: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> None:  # fmt: skip
        self.schedule, self.dout, self.dlse, self.wanted = schedule, dout, dlse, without_sink(wanted)
        self.q, self.k, self.v, self.bias, self.by_head, self.sink, *results = saved
        self.out, self.residual, self.shift, self.total, self.lse = results
        self.wants_sink = wanted[5]
        self.rows = local_rows(schedule.call.q_layout.runs[schedule.group.rank])
        self.key_rows = local_rows(schedule.call.k_layout.runs[schedule.group.rank])
        dtype = compute_dtype(self.q.dtype)
        self.grads = [
            torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if w else None
            for x, w in zip(saved[:5], wanted, strict=False)
        ]

    def run(self) -> tuple[Tensor | None, ...]:
        returning: tuple[list[Tensor], list[Run], Transfer] | None = None
        for step, block in enumerate(blocks(self.schedule, self.k, self.v)):
            dk, dv = (self._zeros(x, w) for x, w in zip(block[1:], self.wanted[1:3], strict=True))
            for keys, at in block.pieces():
                for queries in self.schedule.queries(keys):
                    self._add(queries, keys, at, block, dk, dv)
            if step == 0:
                self._add_own(list(self.key_rows), [dk, dv])
                continue
            if returning is not None:
                self._finish(*returning)
            returning = self._send_back(step, [dk, dv])
        if returning is not None:
            self._finish(*returning)
        inputs = (self.q, self.k, self.v, self.bias, self.by_head)
        grads = [None if g is None else g.to(x.dtype) for g, x in zip(self.grads, inputs, strict=True)]
        return *grads, self._sink() if self.wants_sink else None

    def _zeros(self, x: Tensor, wanted: bool) -> Tensor | None:
        return x.new_zeros(x.shape, dtype=compute_dtype(x.dtype)) if wanted else None

    def _add(
        self, queries: Run, keys: Run, at: slice, block: KeyBlock, dk: Tensor | None, dv: Tensor | None
    ) -> None:
        """Adds the gradients of one rectangle."""
        rows, call = self.rows[queries], self.schedule.call
        q, k, v = self.q[:, :, rows], block.k[:, :, at], block.v[:, :, at]
        p = call.rectangle(queries, keys, q, k, v, self.bias, self.by_head)
        grads = native.backward(
            p, _with_strides(self.out[:, :, rows], p),
            torch.stack([self.shift[:, :, rows], self.total[:, :, rows]]),
            None if self.residual is None else _with_strides(self.residual[:, :, rows], p),
            self.dout[:, :, rows], None if self.dlse is None else self.dlse[:, :, rows],
            self.wanted,
        )  # fmt: skip
        dq, _, _, dbias, dby_head = self.grads
        for whole, part, place in ((dk, grads.k, at), (dv, grads.v, at), (dq, grads.q, rows)):
            if whole is not None and part is not None:
                whole[:, :, place] += part
        if dbias is not None and grads.bias is not None:
            part_of_bias = sliced(dbias, queries, keys)
            part_of_bias.add_(grads.bias.reshape(part_of_bias.shape))
        if dby_head is not None and grads.by_head is not None:
            dby_head += grads.by_head

    def _send_back(self, step: int, grads: list[Tensor | None]) -> tuple[list[Tensor], list[Run], Transfer]:
        """Starts sending gradients to the keys' owner, and receiving those of this rank's keys."""
        schedule, group = self.schedule, self.schedule.group
        owner, receiver = schedule.owner(step), schedule.receiver(step)
        runs = schedule.needed(receiver, group.rank)
        n = sum(end - begin for begin, end in runs)
        sends = [(owner, g.to(self.q.dtype)) for g in grads if g is not None]
        wanted = [x for x, g in zip((self.k, self.v), grads, strict=True) if g is not None]
        buffers = [x.new_empty(*x.shape[:2], n, x.shape[3]) for x in wanted]
        return buffers, runs, start(group, sends, [(receiver, buffer) for buffer in buffers])

    def _finish(self, buffers: list[Tensor], runs: list[Run], transfer: Transfer) -> None:
        transfer.wait()
        received = iter(buffers)
        self._add_own(runs, [next(received) if w else None for w in self.wanted[1:3]])

    def _add_own(self, runs: list[Run], grads: list[Tensor | None]) -> None:
        """Adds gradients (B, Hkv, n, D) of runs of this rank's keys, concatenated."""
        for whole, part in zip(self.grads[1:3], grads, strict=True):
            begin = 0
            for run in runs:
                end = begin + run[1] - run[0]
                if whole is not None and part is not None:
                    whole[:, :, self.key_rows[run]] += part[:, :, begin:end]
                begin = end

    def _sink(self) -> Tensor:
        """Returns the gradient of the sink (Hq,): minus the sink's weight times delta."""
        dtype = self.lse.dtype
        out = self.out.to(dtype) if self.residual is None else self.out.to(dtype) + self.residual
        delta = (self.dout.to(dtype) * out).sum(-1)
        delta = delta if self.dlse is None else delta - self.dlse
        weight: Tensor = torch.exp(self.sink.to(dtype)[None, :, None] - self.lse)
        grad: Tensor = -(weight * delta).sum((0, 2))
        return grad.to(self.sink.dtype)


def without_sink(wanted: tuple[bool, ...]) -> tuple[bool, bool, bool, bool, bool, bool]:
    q, k, v, bias, by_head, _ = wanted
    return q, k, v, bias, by_head, False


def _with_strides(out: Tensor, p: Problem) -> Tensor:
    """Returns out with the strides that the kernels expect of the problem's output."""
    if out.stride() == p.spec.out_stride:
        return out
    return out.new_empty_strided(out.shape, p.spec.out_stride).copy_(out)


def ring(call: DistributedCall, group: Group, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's shards of out and the LSE."""
    bias = call.options.bias
    by_head = None
    if isinstance(bias, Alibi):
        by_head = bias.slopes.to(compute_dtype(q.dtype)).contiguous()
    elif isinstance(bias, RelativeBias):
        far = bias.max_distance
        by_head = bias.in_dtype(compute_dtype(q.dtype)).by_distance(-far, far)
    tensor = bias if isinstance(bias, Tensor) else None
    inputs = (q, k, v, tensor, by_head, call.options.sink)
    return Ring.apply(Schedule(call, group), *inputs)  # type: ignore[no-any-return,no-untyped-call]
