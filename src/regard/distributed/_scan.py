"""Linear attention over the runs of a sequence, in order: each run begins with the state of the last.

The rank with the next run receives the state, S and z in one tensor, for some of the samples or
heads at a time. So it computes one piece while the rank with the previous run computes the next.
Backward passes the gradient of the state the other way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._autograd.linear import gradients, run_saving
from .._backends.native.linear import LinearSaved
from .._call.layout import ordered_like
from .._call.linear import LinearCall, LinearOptions, LinearState, check
from ._group import Group, receive, refuse_second_derivatives, send, wait
from ._pairs import Run
from ._travel import local_rows
from .layouts import Layout, even

PIECES = 4  # for each rank, at most: with P pieces, R ranks take P + R - 1 steps instead of P
INPUTS = 6  # the fields of `LinearShards`
Index = tuple[slice, ...]


class Piece(NamedTuple):
    """Some of the samples or heads of a call."""

    samples: slice
    queries: slice  # query heads
    keys: slice  # key heads


def pieces(B: int, Hq: int, Hkv: int, ranks: int, threads: int) -> list[Piece]:
    """Divides the heads or the samples, whichever are more, into pieces that occupy the threads."""
    most, other = max(B, Hkv), max(min(B, Hkv), 1)
    smallest = -(-threads // other)
    runs = even(most, max(min(most // smallest, PIECES * ranks), 1))
    group, every = Hq // max(Hkv, 1), slice(None)
    if Hkv < B:
        return [Piece(slice(a, b), every, every) for a, b in runs]
    return [Piece(every, slice(a * group, b * group), slice(a, b)) for a, b in runs]


class Turn(NamedTuple):
    """A piece of one run of this rank."""

    run: Run
    piece: Piece
    rows: slice  # of the rank's shard
    source: int | None  # the rank with the previous run
    target: int | None  # the rank with the next run

    @property
    def of_queries(self) -> Index:
        return self.piece.samples, self.piece.queries, self.rows

    @property
    def of_keys(self) -> Index:
        return self.piece.samples, self.piece.keys, self.rows

    @property
    def of_state(self) -> Index:
        return self.piece.samples, self.piece.keys


class LinearShards(NamedTuple):
    """The tensors of a call on one rank, in canonical form."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    state: Tensor  # before the first token, packed


@dataclass(frozen=True)
class Scan:
    """A causal call of linear attention, without its tensors."""

    group: Group
    layout: Layout
    pieces: list[Piece]
    backend: str
    scale: float
    normalize: bool
    lengths: Tensor | None  # (B,), of the whole sequence
    return_state: bool

    @property
    def owners(self) -> dict[Run, int]:
        """The rank of each run, in the order of the sequence."""
        pairs = [(run, rank) for rank, runs in enumerate(self.layout.runs) for run in runs]
        return dict(sorted(pairs))

    @property
    def last(self) -> int | None:
        """The rank with the last token. None: there are no tokens."""
        return next(reversed(self.owners.values()), None)

    def turns(self) -> Iterator[Turn]:
        owners = list(self.owners.values())
        order = {run: i for i, run in enumerate(self.owners)}
        for run, rows in local_rows(self.layout.runs[self.group.rank]).items():
            i = order[run]
            source, target = owners[i - 1] if i else None, owners[i + 1] if i + 1 < len(owners) else None
            yield from (Turn(run, piece, rows, source, target) for piece in self.pieces)

    def call(self, turn: Turn, x: LinearShards, state: Tensor) -> LinearCall:
        """Returns the call of a turn that begins with a packed state."""
        q, (k, v, log_decay, beta) = (
            x.q[turn.of_queries],
            (None if t is None else t[turn.of_keys] for t in x[1:5]),
        )
        lengths, (begin, end) = self.lengths, turn.run
        if lengths is not None:
            lengths = (lengths[turn.piece.samples] - begin).clamp(0, end - begin)
        assert k is not None
        assert v is not None
        options = LinearOptions(True, self.normalize, log_decay, beta, lengths, self.unpacked(state))
        return check(q, k, v, self.scale, options)

    def unpacked(self, x: Tensor) -> LinearState:
        return unpacked(x, self.normalize)


def packed(state: LinearState) -> Tensor:
    """Returns S and z in one tensor (B, Hkv, D, Dv + 1), or S without z."""
    return state.S if state.z is None else torch.cat((state.S, state.z[..., None]), -1)


def unpacked(x: Tensor, normalize: bool) -> LinearState:
    return LinearState(x[..., :-1], x[..., -1]) if normalize else LinearState(x)


def first_state(call: LinearCall) -> LinearState:
    """Returns the state before the first token: zeros, if the caller passes none."""
    spec, S, z = call.spec, call.S, call.z
    S = call.k.new_zeros((spec.B, spec.Hkv, spec.D, spec.Dv), dtype=call.dtype) if S is None else S
    if call.normalize and z is None:
        z = call.k.new_zeros((spec.B, spec.Hkv, spec.D), dtype=call.dtype)
    return LinearState(S, z)


class StatePass(Function):
    """Maps `LinearShards` to this rank's out and the last state, None without `scan.return_state`."""

    @staticmethod
    def forward(ctx: Any, scan: Scan, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        x, group = LinearShards(*inputs), scan.group
        shape = (*x.q.shape[:3], x.v.shape[3])
        out = x.q.new_empty_strided(shape, ordered_like(x.q.stride(), shape))
        end, sends, saved = x.state.clone(), [], []
        for turn in scan.turns():
            before = x.state[turn.of_state]
            if turn.source is not None:
                before = receive(group, turn.source, before)
            call = scan.call(turn, x, before)
            result, saved_of_turn = run_saving(
                call, scan.backend, any(ctx.needs_input_grad), out[turn.of_queries]
            )
            after = packed(LinearState(result.S, result.z))
            saved += [before, *saved_of_turn]
            if turn.target is not None:
                sends.append(send(group, turn.target, after))
            elif scan.return_state:
                end[turn.of_state] = after
                sends += [send(group, rank, after) for rank in range(group.size) if rank != group.rank]
        if scan.return_state and scan.last not in (None, group.rank):
            for piece in scan.pieces:
                at = (piece.samples, piece.keys)
                end[at] = receive(group, scan.last, end[at])
        wait(sends)
        ctx.scan = scan
        ctx.save_for_backward(*x, *saved)
        return out, end if scan.return_state else None

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dend: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivatives("causal linear attention over processes")
        saved = ctx.saved_tensors  # read once: under checkpointing each access recomputes forward
        x, scan, sends = LinearShards(*saved[:INPUTS]), ctx.scan, []
        grads: list[Any] = [
            None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
            for t in saved[:INPUTS]
        ]
        dend = torch.zeros_like(x.state) if dend is None else _sum_at_last(scan, dend)
        dstate = dend.clone() if scan.last is None else torch.zeros_like(dend)
        for i, turn in reversed(list(enumerate(scan.turns()))):
            before, *saved_of_turn = saved[INPUTS + 4 * i : INPUTS + 4 * i + 4]
            dafter = dend[turn.of_state]
            if turn.target is not None:
                dafter = receive(scan.group, turn.target, dafter)
            call, dy = scan.call(turn, x, before), (dout[turn.of_queries], *scan.unpacked(dafter))
            dq, dk, dv = grads[0][turn.of_queries], grads[1][turn.of_keys], grads[2][turn.of_keys]
            *gates, dS, dz = gradients(call, scan.backend, LinearSaved(*saved_of_turn), dy, (dq, dk, dv))
            assert dS is not None
            dbefore = packed(LinearState(dS, dz))
            if turn.source is None:
                dstate[turn.of_state] = dbefore
            else:
                sends.append(send(scan.group, turn.source, dbefore))
            for grad, part in zip(grads[3:5], gates, strict=True):
                if grad is not None and part is not None:
                    grad[turn.of_keys] = part
        wait(sends)
        return None, *grads[:-1], dstate


def _sum_at_last(scan: Scan, dend: Tensor) -> Tensor:
    """Returns the sum of all ranks' gradients of the last state, on the rank with the last token."""
    group = scan.group
    if scan.last is None:
        return dend
    if scan.last != group.rank:
        wait([send(group, scan.last, dend)])
        return dend
    terms = [dend if rank == group.rank else receive(group, rank, dend) for rank in range(group.size)]
    return torch.stack(terms).sum(0)
