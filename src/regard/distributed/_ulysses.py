"""Ulysses: an exchange gives each rank all tokens of some heads, and a second one undoes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ._call import DistributedCall
from ._gather import attend
from ._group import Group, swapped
from ._pairs import Run
from ._ring import ring
from .layouts import Layout, even, in_order, take

HINT = "; use method='ring' or 'gather', or Ulysses inside a ring: method='usp'"


def head_shares(Hq: int, Hkv: int, ranks: int, hint: str = "") -> list[tuple[Run, Run]]:
    """Returns the query heads and the key heads of each rank.

    With at least as many key heads as ranks, whole groups are dealt out. With fewer, each key head
    goes to several ranks, which share its query heads.
    """
    group = Hq // Hkv
    if Hkv >= ranks:
        keys = even(Hkv, ranks)
        return [((a * group, b * group), (a, b)) for a, b in keys]
    sharing = [end - begin for begin, end in even(ranks, Hkv)]  # ranks of each key head
    if max(sharing) > group:
        raise ValueError(
            f"mesh: expected at most Hq = {Hq} ranks with Hkv = {Hkv} key heads, so that each rank has a "
            f"query head, got {ranks}{hint}"
        )
    shares = []
    for head, count in enumerate(sharing):
        shares += [((head * group + a, head * group + b), (head, head + 1)) for a, b in even(group, count)]
    return shares


Inner = Callable[[Tensor, list[Tensor], Run, Run], tuple[Tensor, Tensor]]


def ulysses(
    call: DistributedCall, groups: list[Group], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns this rank's shards of out and the LSE."""
    (group,) = groups

    def inner(q: Tensor, keys: list[Tensor], heads: Run, _: Run) -> tuple[Tensor, Tensor]:
        k, v = keys
        return attend(call, (0, call.Lq), (0, call.Lk), q, k, v, heads)

    return exchanged(call, group, (call.q_layout, call.k_layout), q, [k, v], inner)


def exchanged(
    call: DistributedCall, group: Group, layouts: tuple[Layout, Layout], q: Tensor, keys: list[Tensor],
    inner: Inner,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs `inner` on all tokens of this rank's query heads and key heads, between two exchanges.

    `keys` are keys and values, or latents, which have one head that all ranks get.
    """
    shares, (q_layout, k_layout) = head_shares(call.Hq, call.Hkv, group.size, HINT), layouts
    query_heads, key_heads = ([share[i] for share in shares] for i in (0, 1))
    q = _to_heads(group, q_layout, q, query_heads)
    keys = [
        _to_heads(group, k_layout, x, key_heads if x.shape[1] == call.Hkv else [(0, 1)] * group.size)
        for x in keys
    ]
    out, lse = inner(q, keys, *shares[group.rank])
    out = _to_tokens(group, q_layout, out, query_heads)
    return out, _to_tokens(group, q_layout, lse[..., None], query_heads)[..., 0]


def _to_heads(group: Group, layout: Layout, x: Tensor, heads: list[Run]) -> Tensor:
    """Exchanges (B, H, own tokens, D) for (B, own heads, all tokens, D)."""
    B, _, _, D = x.shape
    begin, end = heads[group.rank]
    shapes = [(B, end - begin, n, D) for n in layout.lengths]
    return in_order(list(swapped(group, [x[:, a:b] for a, b in heads], shapes)), layout, 2)


def _to_tokens(group: Group, layout: Layout, x: Tensor, heads: list[Run]) -> Tensor:
    """Exchanges (B, own heads, all tokens, D) for (B, H, own tokens, D)."""
    B, _, _, D = x.shape
    own = layout.lengths[group.rank]
    shapes = [(B, b - a, own, D) for a, b in heads]
    return torch.cat(swapped(group, [take(x, runs, 2) for runs in layout.runs], shapes), 1)


def usp(call: DistributedCall, groups: list[Group], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A ring among the ranks of the first group, Ulysses among those of the second."""

    def attend_outer(call: DistributedCall, q: Tensor, keys: list[Tensor], _: Run) -> tuple[Tensor, Tensor]:
        return ring(call, groups, q, *keys)

    return in_groups(call, groups, q, [k, v], attend_outer)


AttendOuter = Callable[[DistributedCall, Tensor, list[Tensor], Run], tuple[Tensor, Tensor]]


def in_groups(
    call: DistributedCall, groups: list[Group], q: Tensor, keys: list[Tensor], attend_outer: AttendOuter
) -> tuple[Tensor, Tensor]:
    """Exchanges tokens for heads in the second group.

    `attend_outer` gets the call of this rank's heads, whose tokens the ranks of the first group hold.
    """
    outer, inner_group = groups
    size, first = inner_group.size, outer.rank * inner_group.size
    layouts = _local(call.q_layout, first, size), _local(call.k_layout, first, size)

    def inner(q: Tensor, keys: list[Tensor], heads: Run, key_heads: Run) -> tuple[Tensor, Tensor]:
        of_outer = replace(
            call.of_heads(heads, key_heads[1] - key_heads[0]), q_layout=call.q_layout.grouped(size),
            k_layout=call.k_layout.grouped(size),
        )  # fmt: skip
        return attend_outer(of_outer, q, keys, key_heads)

    return exchanged(call, inner_group, layouts, q, keys, inner)


def _local(layout: Layout, first: int, size: int) -> Layout:
    """Returns the layout of ranks [first, first + size), with their tokens renumbered from 0."""
    runs = layout.runs[first : first + size]
    starts, position = {}, 0
    for begin, end in sorted(run for of_rank in runs for run in of_rank):
        starts[begin], position = position, position + end - begin
    return Layout(tuple(tuple((starts[a], starts[a] + b - a) for a, b in of_rank) for of_rank in runs))
