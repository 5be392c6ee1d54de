"""Distributed calls of linear attention of tests, and the same calls in a single process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import regard
from regard import LinearState, distributed as D
from regard.distributed import _group
from regard.distributed.layouts import in_order

from .linear import Case

SHARDED = ("q", "k", "v", "log_decay", "beta")


@dataclass
class Sharded:
    """A call with its layouts of queries and of keys, and the gradients of its results."""

    case: Case
    layouts: tuple[D.Layout, D.Layout]
    dout: Tensor
    dstate: LinearState
    recompute: bool = False  # under activation checkpointing


def sharded(case: Case, layout: D.Layout, k_layout: D.Layout | None = None, **fields: Any) -> Sharded:
    draw = torch.Generator().manual_seed(1)
    out, state = regard.linear_attention(*case[:3], **case.options, return_state=True)
    dys = [
        None if x is None else torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype)
        for x in (out, *state)
    ]
    assert dys[0] is not None
    return Sharded(case, (layout, k_layout or layout), dys[0], LinearState(*dys[1:]), **fields)  # type: ignore[arg-type]


def _results(case: Case, x: Sharded, dout: Tensor, share: float, call: Any) -> dict[str, Tensor]:
    """Returns the results of a call and the gradients of its inputs, by name."""
    case = case.requiring_grad()
    out, state = call(*case[:3], **case.options, return_state=True)
    loss = (out * dout).sum()
    for y, dy in zip(state, x.dstate, strict=True):
        loss = loss if y is None else loss + (y * dy).sum() * share
    grads = torch.autograd.grad(loss, list(case.inputs.values()), allow_unused=True, materialize_grads=True)
    results = {"out": out, "end": state.S} | ({} if state.z is None else {"z_end": state.z})
    return {name: y.detach() for name, y in (results | dict(zip(case.inputs, grads, strict=True))).items()}


def single(x: Sharded) -> dict[str, Tensor]:
    return _results(x.case, x, x.dout, 1.0, regard.linear_attention)


def on_rank(mesh: DeviceMesh, x: Sharded) -> dict[str, Tensor]:
    """Returns the results of a rank's shard. Its share of the loss of the last state is 1 / ranks."""

    def call(*args: Any, **options: Any) -> Any:
        layout = x.layouts[0] if x.layouts[0] == x.layouts[1] else x.layouts
        options |= {"mesh": mesh, "layout": layout}
        if x.recompute:
            return checkpoint(D.linear_attention, *args, use_reentrant=False, **options)
        return D.linear_attention(*args, **options)

    dout = D.shard(x.dout, x.layouts[0], mesh.get_rank(), 2)
    return _results(shard_of(x, mesh), x, dout, 1 / mesh.size(), call)


def shard_of(x: Sharded, mesh: DeviceMesh) -> Case:
    rank, (of_q, of_k) = mesh.get_rank(), x.layouts
    options = dict(x.case.options)
    for name in ("log_decay", "beta"):
        gate = options.get(name)
        if isinstance(gate, Tensor) and gate.ndim > 1:
            options[name] = D.shard(gate, of_k, rank, 2)
    q, k, v = x.case[:3]
    return Case(D.shard(q, of_q, rank, 2), *(D.shard(t, of_k, rank, 2) for t in (k, v)), options)


def joined(x: Sharded, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the whole results from those of all ranks. Shares of gradients are summed."""
    whole = {}
    for name, first in parts[0].items():
        tensors = [part[name] for part in parts]
        if name in ("end", "z_end"):
            assert all(torch.equal(first, other) for other in tensors)
            whole[name] = first
        elif name in (*SHARDED, "out") and first.ndim > 1:
            whole[name] = in_order(tensors, x.layouts[0 if name in ("q", "out") else 1], 2)
        else:
            whole[name] = torch.stack(tensors).sum(0)
    return whole


def bytes_sent(mesh: DeviceMesh, x: Sharded, return_state: bool) -> tuple[int, int]:
    """Returns the bytes that a rank sends in forward and in backward."""
    case = shard_of(x, mesh).requiring_grad()
    _group.sent_bytes = 0
    result = D.linear_attention(
        *case[:3], **case.options, mesh=mesh, layout=x.layouts[0], return_state=return_state
    )
    forward = _group.sent_bytes
    (result[0] if return_state else result).sum().backward()
    return forward, _group.sent_bytes - forward


def call_with(mesh: DeviceMesh, lengths: list[int], of_ranks: list[dict[str, Any]]) -> Tensor:
    """Calls linear attention with the lengths and options of this rank."""
    rank = mesh.get_rank()
    options = {"Hq": 4, "D": 8} | of_ranks[min(rank, len(of_ranks) - 1)]
    Hq, width = options.pop("Hq"), options.pop("D")
    q, k, v = (torch.ones(1, Hq, lengths[rank], width) for _ in range(3))
    return D.linear_attention(q, k, v, mesh=mesh, **options)
