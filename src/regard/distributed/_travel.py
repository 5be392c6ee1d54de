"""Which keys and values travel in a ring, and when.

In step s, a rank receives the keys of rank (rank - s) mod R from their owner and computes while the
keys of the next step travel. Only runs of keys that some query of the receiver may attend to are
sent. Large blocks travel in parts of some key heads, so that a rank holds little besides its shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ._call import DistributedCall
from ._group import Group, Transfer, start
from ._pairs import Run
from .layouts import even, joined, take

PART_BYTES = 2**21  # of the keys and values of a part, unless one head has more


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


class Part(NamedTuple):
    """Some heads of a ring. They pass through all steps before those of the next part begin."""

    schedule: Schedule  # of a call that has these heads alone
    heads: slice
    key_heads: slice


def parts(schedule: Schedule, k: Tensor, v: Tensor) -> list[Part]:
    """Divides the heads. All ranks get the same division."""
    call, group = schedule.call, schedule.group
    size = call.B * call.Hkv * max(call.k_layout.lengths) * (k.shape[3] + v.shape[3]) * k.element_size()
    count = part_count(call.Hkv, size, group.size)
    if count <= 1:
        return [Part(schedule, slice(None), slice(None))]
    per_key, divided = call.Hq // call.Hkv, []
    for begin, end in even(call.Hkv, count):
        heads = (begin * per_key, end * per_key)
        of_heads = Schedule(call.of_heads(heads, end - begin), group)
        divided.append(Part(of_heads, slice(*heads), slice(begin, end)))
    return divided


def part_count(Hkv: int, size: int, ranks: int) -> int:
    """Returns the number of parts of blocks with Hkv key heads and `size` bytes."""
    return min(Hkv, -(-size // PART_BYTES)) if ranks > 1 else 1


class KeyBlock(NamedTuple):
    """Runs of keys of one owner, concatenated: k (B, heads, n, D) and v (B, heads, n, Dv)."""

    runs: list[Run]
    k: Tensor
    v: Tensor

    def pieces(self) -> Iterator[tuple[Run, slice]]:
        """Yields each run and its rows in the block."""
        yield from local_rows(tuple(self.runs)).items()


def local_rows(runs: tuple[Run, ...]) -> dict[Run, slice]:
    """Maps each run to its rows in a tensor that concatenates the runs."""
    rows, begin = {}, 0
    for run in runs:
        rows[run] = slice(begin, begin := begin + run[1] - run[0])
    return rows


class Travel:
    """The keys and values of all parts and steps. The next block travels while one is in use."""

    def __init__(self, parts: list[Part], k: Tensor, v: Tensor) -> None:
        group, layout = parts[0].schedule.group, parts[0].schedule.call.k_layout
        self.k, self.v, self.size, self.own = k, v, group.size, layout.runs[group.rank]
        self.rows = local_rows(self.own)
        self.requests = (self._request(part, step) for part in parts for step in range(1, self.size))
        self.following = next(self.requests, None)

    def blocks(self, part: Part) -> Iterator[KeyBlock]:
        """Yields the block of each step. Parts must be used in order, each to its end."""
        yield KeyBlock(list(self.own), self.k[:, part.key_heads], self.v[:, part.key_heads])
        for _ in range(1, self.size):
            assert self.following is not None
            block, transfer = self.following
            transfer.wait()
            self.following = next(self.requests, None)
            yield block

    def _request(self, part: Part, step: int) -> tuple[KeyBlock, Transfer]:
        """Starts sending this rank's keys and receiving those of the step's owner."""
        schedule, heads = part.schedule, part.key_heads
        owner, receiver, rank = schedule.owner(step), schedule.receiver(step), schedule.group.rank
        runs, tensors = schedule.needed(rank, owner), (self.k[:, heads], self.v[:, heads])
        n = sum(end - begin for begin, end in runs)
        block = KeyBlock(runs, *(x.new_empty(*x.shape[:2], n, x.shape[3]) for x in tensors))
        sent = joined((self.rows[run].start, self.rows[run].stop) for run in schedule.needed(receiver, rank))
        sends = [(receiver, take(x, sent, 2).contiguous()) for x in tensors]
        return block, start(schedule.group, sends, [(owner, block.k), (owner, block.v)])
