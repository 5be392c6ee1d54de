"""Invalid calls of distributed attention, and ranks that die or stall."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import regard
from regard import distributed as D, masks as M
from regard.distributed import _group, _travel

TIMEOUT = 8.0  # seconds: the time-out of the process group in tests of faults
L = 17


def call_with(mesh: DeviceMesh, lengths: list[int], of_ranks: list[dict[str, Any]]) -> Tensor:
    """Calls attention with the lengths and options of this rank."""
    rank = mesh.get_rank()
    options = {"Hq": 4, "D": 8} | of_ranks[min(rank, len(of_ranks) - 1)]
    Hq, width = options.pop("Hq"), options.pop("D")
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, Hq, lengths[rank], width) for _ in range(3))
    return D.attention(q, k, v, mesh=mesh, **options)


def message(call: Callable[[], Any]) -> str:
    """Returns the type and the message of the exception that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_dtensors(mesh: DeviceMesh) -> dict[str, str]:
    """Returns the messages of calls with a DTensor as each argument."""
    x = torch.zeros(1, 2, 8, 8)
    shard = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
    sink = DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False)
    bias = DTensor.from_local(torch.zeros(16, 16), mesh, [Replicate()], run_check=False)
    latent = DTensor.from_local(torch.zeros(1, 8, 8), mesh, [Shard(1)], run_check=False)
    return {
        "q": message(lambda: D.attention(shard, x, x, mesh=mesh)),
        "v": message(lambda: D.attention(x, x, shard, mesh=mesh, method="gather")),
        "sink": message(lambda: D.attention(x, x, x, mesh=mesh, sink=sink)),
        "bias": message(lambda: D.attention(x, x, x, mesh=mesh, bias=bias)),
        "k": message(lambda: D.linear_attention(x, shard, x, mesh=mesh)),
        "latent": message(lambda: D.latent_attention(x, latent, rank=8, mesh=mesh)),
    }


def three_dims(mesh: DeviceMesh) -> str:
    other = DeviceMesh("cpu", torch.arange(4).view(1, 2, 2), mesh_dim_names=("dp", "ring", "ulysses"))
    x = torch.zeros(1, 2, 8, 8)
    return message(lambda: D.attention(x, x, x, mesh=other))


def overflow(mesh: DeviceMesh, method: str) -> tuple[str, str]:
    """Returns the messages of a call whose scores overflow on one rank only, and of a call after it."""
    torch.manual_seed(0)
    layout = D.contiguous(L, mesh.size())
    rank = mesh.get_rank() if mesh.ndim == 2 else mesh.get_local_rank()
    q, k, v = (torch.randn(1, 4, L, 8) for _ in range(3))
    q[:, 1, 3] *= 1e20
    k *= 1e20

    def call(q: Tensor, method: str) -> None:
        shards = (D.shard(x, layout, rank, 2) for x in (q, k, v))
        out = D.attention(*shards, mesh=mesh, layout=layout, method=method, mask=M.Causal())
        whole = regard.attention(q, k, v, mask=M.Causal())
        torch.testing.assert_close(out, D.shard(whole, layout, rank, 2), equal_nan=True)

    return message(lambda: call(q, method)), message(lambda: call(q * 1e-20, method))


# Faults. Rank 1 dies or stalls before or during a call.


def _dies() -> None:
    os._exit(1)


def _stalls() -> None:
    time.sleep(3600)


def _at_exchange(fault: Callable[[], None], number: int) -> None:
    """Makes this process fail at the given exchange of tensors."""
    start, exchanges = _group.start, 0

    def failing(*arguments: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        if exchanges == number:
            fault()
        return start(*arguments)

    _group.start = _travel.start = failing


def _fails(mesh: DeviceMesh, method: str, fault: Callable[[], None], exchange: int) -> None:
    if mesh.get_local_rank() == 1:
        _at_exchange(fault, exchange)
        if exchange == 0:
            fault()
    x = [torch.randn(1, 4, 9 - mesh.get_local_rank(), 8, requires_grad=True) for _ in range(3)]
    if method == "linear":
        D.linear_attention(*x, mesh=mesh).sum().backward()
    else:
        D.attention(*x, mesh=mesh, method=method).sum().backward()


def dies(mesh: DeviceMesh, method: str, exchange: int) -> None:
    _fails(mesh, method, _dies, exchange)


def stalls(mesh: DeviceMesh, method: str, exchange: int) -> None:
    _fails(mesh, method, _stalls, exchange)
