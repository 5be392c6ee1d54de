"""The methods of attention over processes: what travels, and what a rank computes and holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._call.spec import compute_dtype
from .._tools.arguments import number
from ..distributed import Layout
from ..distributed._travel import part_count
from ..distributed._ulysses import head_shares
from ._call import CallSpec
from ._steps import Steps


@dataclass(frozen=True)
class RankLink:
    """The network link of a rank, which sends and receives at the same time.

    A rank handles its messages one after the other. Each takes `latency` and its bytes / `bandwidth`.
    The defaults are those of Ethernet with 25 Gbit/s.
    """

    bandwidth: float = 3.125e9  # bytes/s in each direction
    latency: float = 50e-6  # seconds

    def __post_init__(self) -> None:
        check_rate("bandwidth", self.bandwidth)
        if not 0 <= number("latency", self.latency) < math.inf:
            raise ValueError(f"latency: expected a number of seconds from 0, got {self.latency}")

    def seconds(self, messages: Tensor, size: Tensor) -> Tensor:
        return messages.double() * self.latency + size.double() / self.bandwidth


def check_rate(name: str, value: float) -> None:
    if not 0 < number(name, value) < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value}")


@dataclass(frozen=True)
class RanksCost:
    """The cost of one call of `distributed.attention` with one method.

    Each number is that of the rank for which it is largest, unless it says otherwise.
    """

    method: str  # "ring", "gather", "ulysses" or "usp"
    mesh: tuple[int, ...]  # for "usp" two sizes: the ring and the Ulysses groups
    received_bytes: int
    total_bytes: int  # of all ranks
    messages: int  # received, those of the agreement before the call included
    compute: float  # seconds
    communication: float  # seconds, if nothing overlapped
    seconds: float  # of the call
    memory_bytes: int  # of tensors at the peak of the forward pass, q, k and v included

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)


class Sizes(NamedTuple):
    """The heads of a call, and the bytes of a token in one head, of all samples."""

    Hq: int
    Hkv: int
    q: int
    kv: int
    out: int
    lse: int
    merged: int  # of an output in the compute type
    residual: int  # of the rounding error of a 16-bit output

    @classmethod
    def of(cls, call: CallSpec) -> Sizes:
        B, D, Dv, size = call.B, call.D, call.Dv or call.D, call.dtype.itemsize
        wide, out = compute_dtype(call.dtype).itemsize, B * Dv * size
        widths = (B * D * size, B * D * size + out, out, B * wide, B * Dv * wide)
        return cls(call.Hq, call.Hkv or call.Hq, *widths, out if size == 2 else 0)


class Phase(NamedTuple):
    """One pass of all ranks: bytes and messages that each receives, and seconds."""

    received: Tensor
    messages: Tensor
    compute: Tensor
    communication: Tensor
    seconds: float  # of the slowest rank


class Ranks(NamedTuple):
    """A call, its division among ranks, and the speed of a rank."""

    sizes: Sizes
    layout: Layout
    link: RankLink
    pair_seconds: tuple[float, ...]  # of a visible pair of one head, in forward and backward

    def cost(self, method: str, mesh: tuple[int, ...], phases: Iterable[Phase], memory: Tensor) -> RanksCost:
        received, messages, compute, communication, seconds = zip(*phases, strict=True)
        agreement = sum(n - 1 for n in mesh)  # `all_gather` passes headers around each group
        waiting = agreement * self.link.latency
        return RanksCost(
            method, mesh, int(sum(received).max()), int(sum(received).sum()),
            agreement + int(sum(messages).max()), float(sum(compute).max()),
            waiting + float(sum(communication).max()), waiting + sum(seconds), int(memory.max()),
        )  # fmt: skip


def heads_suffice(x: Ranks, inner: int) -> bool:
    try:
        return bool(head_shares(x.sizes.Hq, x.sizes.Hkv, inner))
    except ValueError:
        return False


def cost_of_gather(x: Ranks, steps: Steps) -> RanksCost:
    z, row, phases = x.sizes, x.sizes.Hkv * x.sizes.kv, []
    for backward, seconds in enumerate(x.pair_seconds):
        # In backward, gradients of keys and values go back to their owners.
        received, sent = (row * steps.exchanged[i] for i in (backward, 1 - backward))
        messages = 2 * steps.peers[backward]
        communication = x.link.seconds(messages, torch.maximum(received, sent))
        compute = (steps.pairs.sum(0) * z.Hq).double() * seconds
        slowest = float((compute + communication).max())
        phases.append(Phase(received, messages, compute, communication, slowest))
    own = torch.tensor(x.layout.lengths)
    q, result = own * z.Hq * z.q, own * z.Hq * (z.out + z.lse)
    copied = max(map(len, x.layout.runs)) > 1  # several runs are concatenated before they are sent
    values = row // 2 * (steps.exchanged[0] + copied * steps.exchanged[1])
    memory = q + own * row + x.layout.L * row + torch.maximum(values, q + result)
    return x.cost("gather", (x.layout.ranks,), phases, memory)


def cost_in_groups(x: Ranks, inner: int, steps: Steps) -> RanksCost:
    """Returns the cost of Ulysses in groups of `inner` ranks, and a ring of `steps` among the groups."""
    groups = Groups.of(x, inner)
    phases = [groups.phase(x, steps, *each) for each in enumerate(x.pair_seconds)]
    outer = x.layout.ranks // inner
    method = "ring" if inner == 1 else "ulysses" if outer == 1 else "usp"
    mesh = (outer, inner) if method == "usp" else (x.layout.ranks,)
    return x.cost(method, mesh, phases, groups.memory(x.sizes))


class Groups(NamedTuple):
    """Groups of ranks that exchange tokens for heads. Tensors are [group, rank in the group]."""

    own: Tensor  # tokens of a rank
    group: Tensor  # tokens of its group
    q: Tensor  # query heads for which the rank computes the tokens of the group
    k: Tensor  # key heads
    parts: Tensor  # of these heads, which travel one after the other

    @classmethod
    def of(cls, x: Ranks, inner: int) -> Groups:
        own = torch.tensor(x.layout.lengths).view(-1, inner)
        group, z = own.sum(1, keepdim=True), x.sizes
        q, k = torch.tensor(head_shares(z.Hq, z.Hkv, inner)).diff(dim=2)[..., 0].T
        parts = [part_count(int(n), int(n * group.max()) * z.kv, len(own)) for n in k]
        return cls(own, group, q, k, torch.tensor(parts))

    def phase(self, x: Ranks, steps: Steps, backward: int, seconds: float) -> Phase:
        received, sent, messages = self._exchange(x.sizes, backward)
        exchange = x.link.seconds(messages, torch.maximum(received, sent))
        tokens, peers = ([n[:, None] for n in pair] for pair in (steps.exchanged, steps.peers))
        # In backward, keys travel again, and their gradients go back.
        ring = (tokens[0] + backward * tokens[1]) * self.k * x.sizes.kv
        ring_messages = 2 * (peers[0] + backward * peers[1]) * self.parts
        compute = (steps.pairs.sum(0)[:, None] * self.q).double() * seconds
        slowest = int(self.q.argmax())
        clock = steps.clock(
            int(self.q[slowest]) * seconds, int(self.k[slowest]) * x.sizes.kv / x.link.bandwidth,
            2 * int(self.parts[slowest]) * x.link.latency, bool(backward),
        )  # fmt: skip
        return Phase(
            received + ring, messages + ring_messages, compute,
            exchange + x.link.seconds(ring_messages, ring), float(exchange.max() + clock.max()),
        )  # fmt: skip

    def _exchange(self, z: Sizes, backward: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the bytes that each rank receives and sends, and its messages.

        Forward exchanges q, k, v, out and the LSE, backward the gradients of the first four.
        """
        own, others, left = self.own, self.group - self.own, z.Hq - self.q
        out = z.out if backward else z.out + z.lse
        received = others * (self.q * z.q + self.k * z.kv) + own * left * out
        sent = own * (left * z.q + (self.k.sum() - self.k) * z.kv) + others * self.q * out
        messages = torch.full_like(own, (5 - backward) * (own.shape[1] - 1))
        return (sent, received, messages) if backward else (received, sent, messages)

    def memory(self, z: Sizes) -> Tensor:
        rows, inputs = self.group * self.q, self.own * (z.Hq * z.q + z.Hkv * z.kv)
        held, exchange = rows * (z.out + z.lse), torch.zeros_like(rows)
        if self.own.shape[1] > 1:
            held = held + rows * z.q + self.group * self.k * z.kv
            exchange = rows * z.out + self.own * z.Hq * z.out
        if len(self.own) == 1:
            return inputs + held + exchange
        blocks = 2 * self.group.max() * self.k * z.kv // self.parts
        merged = z.merged * (1 + (self.parts > 1) + (z.residual > 0))  # of this part and the one before
        part = rows // self.parts * (merged + z.out + z.residual)
        return inputs + held + torch.maximum(rows * (2 * z.lse + z.residual) + blocks + part, exchange)
