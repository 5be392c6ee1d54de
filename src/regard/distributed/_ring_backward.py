"""The backward pass of ring attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._backends.native import attention as native
from .._call.spec import Problem, compute_dtype
from ._call import bias_of_heads, of_heads, sliced
from ._group import Transfer, start
from ._pairs import Run
from ._travel import KeyBlock, Part, Schedule, Travel, local_rows, parts

Maybe = Tensor | None
Wanted = tuple[bool, bool, bool, bool, bool, bool]


class RingBackward:
    """Computes the gradients of `Ring`, one part of the heads after the other."""

    def __init__(
        self, schedule: Schedule, saved: tuple[Any, ...], dout: Tensor, dlse: Maybe, wanted: Wanted
    ) -> None:
        self.inputs, self.dout, self.dlse, self.wanted = saved[:6], dout, dlse, wanted
        self.out, self.residual, self.stats, self.lse = saved[6:]
        self.divided = parts(schedule, *saved[1:3])
        dtype = compute_dtype(self.inputs[0].dtype)
        # Several parts may add to the gradients of a bias; those of q, k, v and the sink are written.
        self.grads = [
            None if not w else torch.zeros_like(x, dtype=dtype) if i in (3, 4) else torch.empty_like(x)
            for i, (x, w) in enumerate(zip(self.inputs, wanted, strict=True))
        ]

    def run(self) -> tuple[Maybe, ...]:
        travel = Travel(self.divided, *self.inputs[1:3])
        for part in self.divided:
            backward = PartBackward(part, self)
            for whole, grad, heads in zip(
                self.grads[:3],
                backward.run(travel),
                (part.heads, part.key_heads, part.key_heads),
                strict=True,
            ):
                if whole is not None and grad is not None:
                    whole[:, heads] = grad
            if self.grads[5] is not None:
                self.grads[5][part.heads] = backward.sink(self.inputs[5][part.heads])
        return tuple(
            None if g is None else g.to(x.dtype) for g, x in zip(self.grads, self.inputs, strict=True)
        )


class Returning(NamedTuple):
    """Gradients of this rank's keys, on their way from another rank."""

    runs: list[Run]
    dk: Maybe
    dv: Maybe
    transfer: Transfer


class PartBackward:
    """The backward pass of some heads. Tensors have these heads alone."""

    def __init__(self, part: Part, ring: RingBackward) -> None:
        q, _k, _v, bias, by_head, _ = ring.inputs
        heads = part.heads
        self.part, self.schedule, self.wanted = part, part.schedule, without_sink(ring.wanted)
        self.q, self.bias, self.by_head = q[:, heads], bias_of_heads(bias, heads), of_heads(by_head, heads)
        self.out, self.residual = ring.out[:, heads], of_heads(ring.residual, heads, 1)
        self.stats, self.lse = ring.stats[:, :, heads], ring.lse[:, heads]
        self.dout, self.dlse = ring.dout[:, heads], of_heads(ring.dlse, heads, 1)
        self.dbias, self.dby_head = bias_of_heads(ring.grads[3], heads), of_heads(ring.grads[4], heads)
        self.dq = _zeros(self.q, ring.wanted[0])
        layouts = (self.schedule.call.q_layout, self.schedule.call.k_layout)
        self.rows, self.key_rows = (local_rows(x.runs[self.schedule.group.rank]) for x in layouts)

    def run(self, travel: Travel) -> tuple[Maybe, Maybe, Maybe]:
        """Returns the gradients of q, k and v, in the compute type."""
        own: tuple[Maybe, Maybe] = (None, None)
        returning: Returning | None = None
        for step, block in enumerate(travel.blocks(self.part)):
            grads = self._block(block)
            if step == 0:
                own = grads
                continue
            if returning is not None:
                self._finish(returning, own)
            returning = self._send_back(step, block, grads)
        if returning is not None:
            self._finish(returning, own)
        return self.dq, *own

    def _block(self, block: KeyBlock) -> tuple[Maybe, Maybe]:
        """Returns the gradients of a block's keys and values, and adds those of the queries."""
        dk, dv = _zeros(block.k, self.wanted[1]), _zeros(block.v, self.wanted[2])
        for keys, at in block.pieces():
            for queries in self.schedule.queries(keys):
                self._rectangle(queries, keys, at, block, dk, dv)
        return dk, dv

    def _rectangle(self, queries: Run, keys: Run, at: slice, block: KeyBlock, dk: Maybe, dv: Maybe) -> None:
        """Adds the gradients of one rectangle."""
        rows, call = self.rows[queries], self.schedule.call
        q, k, v = self.q[:, :, rows], block.k[:, :, at], block.v[:, :, at]
        p = call.rectangle(queries, keys, q, k, v, self.bias, self.by_head)
        grads = native.backward(
            p, _with_strides(self.out[:, :, rows], p), self.stats[:, :, :, rows].contiguous(),
            None if self.residual is None else _with_strides(self.residual[:, :, rows], p),
            self.dout[:, :, rows], None if self.dlse is None else self.dlse[:, :, rows],
            self.wanted,
        )  # fmt: skip
        for whole, grad, place in ((dk, grads.k, at), (dv, grads.v, at), (self.dq, grads.q, rows)):
            if whole is not None and grad is not None:
                whole[:, :, place] += grad
        if self.dbias is not None and grads.bias is not None:
            dbias = sliced(self.dbias, queries, keys)
            dbias.add_(grads.bias.reshape(dbias.shape))
        if self.dby_head is not None and grads.by_head is not None:
            self.dby_head.add_(grads.by_head)

    def _send_back(self, step: int, block: KeyBlock, grads: tuple[Maybe, Maybe]) -> Returning:
        """Starts sending gradients to the keys' owner, and receiving those of this rank's keys."""
        schedule, group = self.schedule, self.schedule.group
        owner, receiver = schedule.owner(step), schedule.receiver(step)
        runs = schedule.needed(receiver, group.rank)
        n = sum(end - begin for begin, end in runs)
        dk, dv = (
            None if g is None else x.new_empty(*x.shape[:2], n, x.shape[3])
            for x, g in zip((block.k, block.v), grads, strict=True)
        )
        sends = [(owner, g.to(self.q.dtype)) for g in grads if g is not None]
        transfer = start(group, sends, [(receiver, x) for x in (dk, dv) if x is not None])
        return Returning(runs, dk, dv, transfer)

    def _finish(self, returning: Returning, own: tuple[Maybe, Maybe]) -> None:
        """Waits for gradients of this rank's keys and adds them to the own ones."""
        returning.transfer.wait()
        for run, at in local_rows(tuple(returning.runs)).items():
            for whole, grad in zip(own, (returning.dk, returning.dv), strict=True):
                if whole is not None and grad is not None:
                    whole[:, :, self.key_rows[run]] += grad[:, :, at]

    def sink(self, sink: Tensor) -> Tensor:
        """Returns the gradient of the sink (H,): minus the sink's weight times delta."""
        dtype = self.lse.dtype
        out = self.out.to(dtype) if self.residual is None else self.out.to(dtype) + self.residual
        delta = (self.dout.to(dtype) * out).sum(-1)
        delta = delta if self.dlse is None else delta - self.dlse
        # A row without keys whose sink is -inf has weights of zero and the LSE -inf.
        lse = self.lse.masked_fill(self.lse == -torch.inf, 0)
        weight = torch.exp(sink.to(dtype)[None, :, None] - lse)
        grad: Tensor = -(weight * delta).sum((0, 2))
        return grad


def without_sink(wanted: Wanted) -> Wanted:
    q, k, v, bias, by_head, _ = wanted
    return q, k, v, bias, by_head, False


def _zeros(x: Tensor, wanted: bool) -> Maybe:
    return x.new_zeros(x.shape, dtype=compute_dtype(x.dtype)) if wanted else None


def _with_strides(out: Tensor, p: Problem) -> Tensor:
    """Returns out with the strides that the kernels expect of the problem's output."""
    if out.stride() == p.spec.out_stride:
        return out
    return out.new_empty_strided(out.shape, p.spec.out_stride).copy_(out)
