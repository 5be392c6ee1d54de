"""The inverse of `shard`."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._group import check_mesh, group_of, swapped
from .layouts import Layout, check_rank, in_order


def unshard(x: Tensor, layout: Layout, mesh: DeviceMesh, dim: int) -> Tensor:
    """Returns the whole tensor from the shards x of all ranks of the mesh.

    All ranks call it and get the same tensor. The gradient of a shard is the sum of the gradients
    that the ranks have for it: if every rank computes the same loss from the whole tensor, divide
    the loss by the number of ranks.
    """
    group = group_of(check_mesh(mesh, 1))
    check_rank(layout, group.rank)
    if layout.ranks != group.size:
        raise ValueError(f"layout: expected {group.size} ranks as in the mesh, got {layout.ranks}")
    own = layout.lengths[group.rank]
    if x.shape[dim] != own:
        raise ValueError(f"x: expected {own} tokens in dim {dim}, rank {group.rank}'s, got {tuple(x.shape)}")
    dim %= x.ndim
    shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in layout.lengths]
    return in_order(list(swapped(group, [x] * group.size, shapes)), layout, dim)
