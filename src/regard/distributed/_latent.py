"""Latent attention: latents travel, and each rank computes keys and values from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._call import DistributedCall
from ._gather import Gathered, attend, on_windows
from ._group import Group
from ._pairs import Run
from ._travel import PART_BYTES, Schedule
from ._ulysses import exchanged, in_groups
from .layouts import even

AttendPart = Callable[[Tensor, Tensor, Tensor, Run], tuple[Tensor, Tensor]]


class Expansion(NamedTuple):
    """How keys and values follow from latents: absorbed without `up`, else expanded."""

    rank: int
    up: Tensor | None  # (H, nope + value, rank)
    value: int  # channels of a value

    @property
    def heads(self) -> int:
        return 1 if self.up is None else self.up.shape[0]

    def of_heads(self, heads: Run) -> Expansion:
        return self if self.up is None else self._replace(up=self.up[heads[0] : heads[1]])

    def __call__(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values (B, heads, n, ...) of latents (B, 1, n, rank + rope)."""
        if self.up is None:
            return latent, latent[..., : self.rank]
        content, rotary = latent.split((self.rank, latent.shape[3] - self.rank), 3)
        by_head = (
            F.linear(content[:, 0], self.up.flatten(0, 1)).unflatten(2, (self.heads, -1)).transpose(1, 2)
        )
        nope, v = by_head.split((by_head.shape[3] - self.value, self.value), 3)
        return torch.cat((nope, rotary.expand(*nope.shape[:3], rotary.shape[3])), 3), v

    def like_results(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tensors with the shapes of keys and values, which depend on the inputs."""
        if self.up is None:
            return self(latent)
        D = latent.shape[3] - self.rank + self.up.shape[1] - self.value
        sizes = (latent.shape[0], self.heads, latent.shape[2])
        return latent[..., :1].expand(*sizes, D), self.up[:1, :1, :1].expand(*sizes, self.value)


@contextlib.contextmanager
def expanded(expand: Expansion, latent: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields keys and values. Backward expands the latents again instead of saving them."""
    k, v = expand(latent)
    if expand.up is None:
        yield k, v
        return
    names = {(x.data_ptr(), x.shape): i for i, x in enumerate((k, v))}
    again: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor | int:
        return names.get((x.data_ptr(), x.shape), x)

    def unpack(saved: Tensor | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved not in again:
            with torch.no_grad():
                again.update(enumerate(expand(latent)))
        return again.pop(saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield k, v


def in_parts(
    expand: Expansion, q: Tensor, latent: Tensor, heads: Run, attend_part: AttendPart
) -> tuple[Tensor, Tensor]:
    """Computes attention for some heads at a time, so that few keys and values exist at once.

    `heads` are those of q in the call of `attend_part`.
    """
    if expand.up is None:
        return attend_part(q, *expand(latent), heads)
    channels = latent.shape[3] - expand.rank + expand.up.shape[1]
    size = latent.shape[0] * latent.shape[2] * channels * latent.element_size()
    results = []
    for begin, end in even(expand.heads, min(expand.heads, -(-size * expand.heads // PART_BYTES)) or 1):
        with expanded(expand.of_heads((begin, end)), latent) as (k, v):
            results.append(attend_part(q[:, begin:end], k, v, (heads[0] + begin, heads[0] + end)))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def gather_latents(
    call: DistributedCall, group: Group, q: Tensor, latent: Tensor, expand: Expansion
) -> tuple[Tensor, Tensor]:
    """Every rank gets the latents that its queries may attend to."""
    (latent,) = Gathered.apply(Schedule(call, group), latent)  # type: ignore[no-untyped-call]

    def attend_part(q: Tensor, k: Tensor, v: Tensor, heads: Run) -> tuple[Tensor, Tensor]:
        return on_windows(call, group, q, k, v, heads)

    return in_parts(expand, q, latent, (0, call.Hq), attend_part)


def ulysses_latents(
    call: DistributedCall, group: Group, q: Tensor, latent: Tensor, expand: Expansion
) -> tuple[Tensor, Tensor]:
    """Every rank gets all latents, and computes the keys and values of its heads."""

    def attend_part(q: Tensor, k: Tensor, v: Tensor, heads: Run) -> tuple[Tensor, Tensor]:
        return attend(call, (0, call.Lq), (0, call.Lk), q, k, v, heads)

    def inner(q: Tensor, keys: list[Tensor], heads: Run, key_heads: Run) -> tuple[Tensor, Tensor]:
        return in_parts(expand.of_heads(key_heads), q, keys[0], heads, attend_part)

    return exchanged(call, group, (call.q_layout, call.k_layout), q, [latent], inner)


def usp_latents(
    call: DistributedCall, groups: list[Group], q: Tensor, latent: Tensor, expand: Expansion
) -> tuple[Tensor, Tensor]:
    """Ulysses in the second mesh dim, gather in the first."""

    def attend_outer(
        call: DistributedCall, q: Tensor, keys: list[Tensor], heads: Run
    ) -> tuple[Tensor, Tensor]:
        return gather_latents(call, groups[0], q, keys[0], expand.of_heads(heads))

    return in_groups(call, groups, q, [latent], attend_outer)


def run_latents(
    method: str, call: DistributedCall, groups: list[Group], q: Tensor, latent: Tensor, expand: Expansion
) -> tuple[Tensor, Tensor]:
    if method == "usp":
        return usp_latents(call, groups, q, latent, expand)
    run = ulysses_latents if method == "ulysses" else gather_latents
    return run(call, groups[0], q, latent, expand)
