"""The peak memory that attention over processes adds to a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import regard
from regard import distributed as Dist, masks as M

from .peak_memory import measure

L, H, D = 8192, 8, 64
MASK = M.Causal() & M.Dilated(64)  # every rank needs keys of every rank, and computes few pairs


def _peak(attend: Callable[..., Any], shards: list[Tensor], work: str) -> int:
    """Returns the peak of a call, with its outputs and gradients and without its inputs."""
    *qkv, dout = shards
    leaves = [x.requires_grad_(work == "backward") for x in qkv]

    def run() -> object:
        out = attend(*leaves)
        return (out, torch.autograd.grad(out, leaves, dout)) if work == "backward" else out

    return min(measure(run) for _ in range(2))  # the first call may load code


def _inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, H, L, D) for _ in range(4)]


def peak_of_whole(_: DeviceMesh, work: str) -> int:
    return _peak(partial(regard.attention, mask=MASK), _inputs(), work)


def peak_of_rank(mesh: DeviceMesh, work: str) -> int:
    layout = Dist.zigzag(L, mesh.size())
    shards = [Dist.shard(x, layout, mesh.get_local_rank(), 2).clone() for x in _inputs()]
    attend = partial(Dist.attention, mesh=mesh, layout=layout, method="ring", mask=MASK)
    return _peak(attend, shards, work)
