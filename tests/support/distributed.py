"""Distributed calls of tests, and the same calls in a single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import regard
from regard import distributed as D
from regard._backends.native import attention as native, core
from regard._call.spec import compute_dtype
from regard.distributed import _group, _travel
from regard.distributed.layouts import in_order
from regard.scores import Alibi, RelativeBias

if TYPE_CHECKING:
    from .ranks import Ranks

QKV_RESULTS = 5  # out, the LSE and the gradients of q, k and v come first in lists of results


@dataclass
class Sharded:
    """A call of attention with its tensors, its layout and its method."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    layout: Any
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    part_bytes: int = _travel.PART_BYTES  # 1: each key head travels in a ring of its own


def case(
    layout: Any, method: str, *, B: int = 2, Hq: int = 4, Hkv: int = 2, D: int = 16, Dv: int = 24,
    dtype: torch.dtype = torch.float32, part_bytes: int = _travel.PART_BYTES, **options: Any,
) -> Sharded:  # fmt: skip
    torch.manual_seed(0)
    q_layout, k_layout = layout if isinstance(layout, tuple) else (layout, layout)
    q, k, v = (
        torch.randn(B, H, x.L, n).to(dtype)
        for H, x, n in ((Hq, q_layout, D), (Hkv, k_layout, D), (Hkv, k_layout, Dv))
    )
    dout = torch.randn(B, Hq, q_layout.L, Dv).to(dtype)
    dlse = torch.randn(B, Hq, q_layout.L).to(compute_dtype(dtype))
    return Sharded(q, k, v, dout, dlse, layout, method, options, part_bytes)


def _parameters(options: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """Returns the options with fresh leaves for learned tensors, and the leaves."""
    options, leaves = dict(options), []
    bias, sink = options.get("bias"), options.get("sink")
    if isinstance(bias, Tensor):
        options["bias"] = bias = bias.detach().clone().requires_grad_()
        leaves.append(bias)
    elif isinstance(bias, Alibi):
        leaves.append(bias.slopes.detach().clone().requires_grad_())
        options["bias"] = Alibi(leaves[-1])
    elif isinstance(bias, RelativeBias):
        leaves.append(bias.table.detach().clone().requires_grad_())
        options["bias"] = bias._with(leaves[-1])
    if sink is not None:
        leaves.append(sink.detach().clone().requires_grad_())
        options["sink"] = leaves[-1]
    return options, leaves


def single(x: Sharded) -> list[Tensor]:
    """Returns out, the LSE and all gradients of the call in one process."""
    options, leaves = _parameters(x.options)
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    out, lse = regard.attention(q, k, v, **options, return_lse=True)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    loss = (out.to(finite) * x.dout.to(finite)).sum() + (finite * x.dlse).sum()
    grads = torch.autograd.grad(loss, (q, k, v, *leaves), allow_unused=True, materialize_grads=True)
    return [out.detach(), lse.detach(), *grads]


def on_rank(mesh: DeviceMesh, x: Sharded) -> list[Tensor]:
    """Returns out, the LSE and all gradients of a rank's shard."""
    with mock.patch.object(_travel, "PART_BYTES", x.part_bytes):
        return _on_rank(mesh, x)


def _on_rank(mesh: DeviceMesh, x: Sharded) -> list[Tensor]:
    rank = mesh.get_rank() if mesh.ndim == 2 else mesh.get_local_rank()
    layouts = x.layout if isinstance(x.layout, tuple) else (x.layout, x.layout)
    options, leaves = _parameters(x.options)
    q, dout, dlse = (D.shard(t, layouts[0], rank, 2) for t in (x.q, x.dout, x.dlse))
    k, v = (D.shard(t, layouts[1], rank, 2) for t in (x.k, x.v))
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    out, lse = D.attention(q, k, v, mesh=mesh, layout=x.layout, method=x.method, **options, return_lse=True)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    loss = (out.to(finite) * dout.to(finite)).sum() + (finite * dlse).sum()
    grads = torch.autograd.grad(loss, (q, k, v, *leaves), allow_unused=True, materialize_grads=True)
    return [out.detach(), lse.detach(), *grads]


def joined(x: Sharded, results: list[list[Tensor]]) -> list[Tensor]:
    """Returns the whole results from those of all ranks: shards joined, parameters' gradients summed."""
    q_layout, k_layout = x.layout if isinstance(x.layout, tuple) else (x.layout, x.layout)
    layouts = (q_layout, q_layout, q_layout, k_layout, k_layout)
    whole = [in_order([r[i] for r in results], layout, 2) for i, layout in enumerate(layouts)]
    return whole + [
        torch.stack(parts).sum(0) for parts in zip(*(r[QKV_RESULTS:] for r in results), strict=True)
    ]


def check(
    ranks: Ranks, shape: int | tuple[int, int], x: Sharded, tolerance: float = 1e-5, of_sums: float = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """Checks all results against a single process: errors relative to the largest element.

    Errors of gradients of biases and sinks, sums whose terms may cancel, may be `of_sums` times as
    large. Returns the results of the ranks, joined, and those of the single process.
    """
    got, expected = joined(x, ranks.run(shape, on_rank, x)), single(x)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        tolerance *= of_sums if i == QKV_RESULTS else 1
        assert torch.equal(a == -torch.inf, b == -torch.inf)
        a, b = (t.masked_fill(t == -torch.inf, 0).double() for t in (a, b))
        largest = max(float(b.abs().max()), 1.0) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * largest)
    return got, expected


def bytes_sent(mesh: DeviceMesh, x: Sharded) -> int:
    layout, rank = x.layout, mesh.get_local_rank()
    q, k, v = (D.shard(t, layout, rank, 2) for t in (x.q, x.k, x.v))
    _group.sent_bytes = 0
    with mock.patch.object(_travel, "PART_BYTES", x.part_bytes):
        D.attention(q, k, v, mesh=mesh, layout=layout, method=x.method, **x.options)
    return _group.sent_bytes


def events_of_ring(mesh: DeviceMesh, x: Sharded) -> list[str]:
    """Returns the order in which a rank starts transfers, waits for them, and computes."""
    events: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            events.append(name)
            return function(*arguments)

        return call

    with (
        mock.patch.object(_travel, "start", recorded("start", _travel.start)),
        mock.patch.object(_group.Transfer, "wait", recorded("wait", _group.Transfer.wait)),
        mock.patch.object(native, "forward_saving", recorded("compute", native.forward_saving)),
    ):
        shards = (D.shard(t, x.layout, mesh.get_local_rank(), 2) for t in (x.q, x.k, x.v))
        D.attention(*shards, mesh=mesh, layout=x.layout, method="ring", **x.options)
    return events


def on_isa(mesh: DeviceMesh, isa: str, x: Sharded) -> list[Tensor]:
    """Runs `on_rank` with an instruction set."""
    with core.use_isa(isa):
        return on_rank(mesh, x)


def second_derivatives(mesh: DeviceMesh | None, x: Sharded) -> list[Tensor]:
    """Returns the gradients of the squared gradients of q, k and v, of a shard or of the whole call."""
    shards = [x.q, x.k, x.v]
    attend: Callable[..., Any] = partial(regard.attention, **x.options)
    if mesh is not None:
        shards = [D.shard(t, x.layout, mesh.get_local_rank(), 2) for t in shards]
        attend = partial(D.attention, mesh=mesh, layout=x.layout, method=x.method, **x.options)
    leaves = [t.detach().clone().requires_grad_() for t in shards]
    grads = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))


def changed_positions(mesh: DeviceMesh, x: Sharded, token: int) -> Tensor:
    """Returns which of this rank's queries change if the key and value of one token change."""
    layout, rank = x.layout, mesh.get_local_rank()
    results = []
    for delta in (0.0, 100.0):
        k, v = x.k.clone(), x.v.clone()
        k[:, :, token] += delta
        v[:, :, token] += delta
        q, k, v = (D.shard(t, layout, rank, 2) for t in (x.q, k, v))
        results.append(D.attention(q, k, v, mesh=mesh, layout=layout, method=x.method, **x.options))
    return (results[0] != results[1]).any(-1)


def unsharded(mesh: DeviceMesh) -> tuple[Tensor, Tensor | None]:
    layout, rank = D.zigzag(13, 3), mesh.get_local_rank()
    x = D.shard(torch.arange(26.0).view(2, 13), layout, rank, 1).requires_grad_()
    whole = D.unshard(x, layout, mesh, 1)
    (whole.sum() * (rank + 1)).backward()
    return whole.detach(), x.grad


def train_example(mesh: DeviceMesh, steps: int) -> list[float]:
    """Runs examples/train_distributed.py. Returns the loss of each step."""
    import importlib.util

    from support import ROOT

    spec = importlib.util.spec_from_file_location(
        "train_distributed", ROOT / "examples" / "train_distributed.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(mesh, steps)
