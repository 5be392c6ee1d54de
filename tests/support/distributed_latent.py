"""Distributed calls of latent attention of tests, and the same calls in a single process."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import regard
from regard import distributed as D
from regard.distributed import _group
from regard.distributed._latent import Expansion
from regard.distributed.layouts import in_order

RANK, NOPE, ROPE, VALUE = 24, 10, 6, 9


@dataclass
class Sharded:
    """A call of latent attention with its layout, and the gradient of its output."""

    q: Tensor
    latent: Tensor
    up: Tensor | None  # None: the absorbed form
    dout: Tensor
    layout: Any
    method: str
    options: dict[str, Any] = field(default_factory=dict)


def case(
    layout: D.Layout, method: str, *, absorbed: bool = False, B: int = 2, H: int = 4,
    dtype: torch.dtype = torch.float32, **options: Any,
) -> Sharded:  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    D_of_q, Dv = (RANK + ROPE, RANK) if absorbed else (NOPE + ROPE, VALUE)
    sizes = (
        (B, H, layout.L, D_of_q), (B, layout.L, RANK + ROPE), (H, NOPE + VALUE, RANK), (B, H, layout.L, Dv)
    )  # fmt: skip
    q, latent, up, dout = (torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes)
    return Sharded(q, latent, None if absorbed else up, dout, layout, method, options)


def _results(x: Sharded, q: Tensor, latent: Tensor, dout: Tensor, call: Any) -> list[Tensor]:
    """Returns out and the gradients of q, the latents and `up`."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, latent, x.up) if t is not None]
    out = call(*leaves)
    (out.float() * dout.float()).sum().backward()
    return [out.detach(), *(t.grad for t in leaves)]  # type: ignore[misc]


def single(x: Sharded) -> list[Tensor]:
    def call(q: Tensor, latent: Tensor, up: Tensor | None = None) -> Tensor:
        content, rotary = latent[:, None].split((RANK, ROPE), 3)
        k, v = latent[:, None], content
        if up is not None:
            nope, v = torch.einsum("bnr,hcr->bhnc", content[:, 0], up).split((NOPE, VALUE), 3)
            k = torch.cat((nope, rotary.expand(-1, q.shape[1], -1, -1)), 3)
        return regard.attention(q, k, v, **x.options)

    return _results(x, x.q, x.latent, x.dout, call)


def on_rank(mesh: DeviceMesh, x: Sharded) -> list[Tensor]:
    def call(q: Tensor, latent: Tensor, up: Tensor | None = None) -> Tensor:
        return D.latent_attention(
            q, latent, up, rank=RANK, mesh=mesh, layout=x.layout, method=x.method, **x.options
        )

    q, latent, dout = (
        D.shard(t, x.layout, mesh.get_rank(), dim) for t, dim in ((x.q, 2), (x.latent, 1), (x.dout, 2))
    )
    return _results(x, q, latent, dout, call)


def joined(x: Sharded, ranks: list[list[Tensor]]) -> list[Tensor]:
    """Returns the whole results from those of all ranks."""
    whole = [in_order([r[i] for r in ranks], x.layout, dim) for i, dim in enumerate((2, 2, 1))]
    return whole + [torch.stack(parts).sum(0) for parts in zip(*(r[3:] for r in ranks), strict=True)]


def bytes_sent(mesh: DeviceMesh, x: Sharded) -> tuple[int, int]:
    """Returns the bytes that a rank sends in forward and in backward."""
    q, latent = (
        D.shard(t, x.layout, mesh.get_rank(), d).requires_grad_() for t, d in ((x.q, 2), (x.latent, 1))
    )
    _group.sent_bytes = 0
    out = D.latent_attention(
        q, latent, x.up, rank=RANK, mesh=mesh, layout=x.layout, method=x.method, **x.options
    )
    forward = _group.sent_bytes
    out.sum().backward()
    return forward, _group.sent_bytes - forward


def alive_after_forward(mesh: DeviceMesh, x: Sharded) -> list[bool]:
    """Returns for each expanded key and value whether it is alive while the graph of out is."""
    made: list[weakref.ref[Tensor]] = []
    expand = Expansion.__call__

    def recorded(self: Expansion, latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = expand(self, latent)
        made.extend((weakref.ref(k), weakref.ref(v)))
        return k, v

    Expansion.__call__ = recorded  # type: ignore[method-assign]
    try:
        q = D.shard(x.q, x.layout, mesh.get_rank(), 2).requires_grad_()
        latent = D.shard(x.latent, x.layout, mesh.get_rank(), 1)
        out = D.latent_attention(
            q, latent, x.up, rank=RANK, mesh=mesh, layout=x.layout, method=x.method, **x.options
        )
        alive = [made_tensor() is not None for made_tensor in made]
        out.sum().backward()
    finally:
        Expansion.__call__ = expand  # type: ignore[method-assign]
    return alive


def call_with(mesh: DeviceMesh, of_ranks: list[dict[str, Any]]) -> Tensor:
    """Calls latent attention with this rank's shapes."""
    sizes = {"q": (1, 4, 9, NOPE + ROPE), "latent": (1, 9, RANK + ROPE), "up": (4, NOPE + VALUE, RANK)}
    options = {"rank": RANK} | of_ranks[min(mesh.get_rank(), len(of_ranks) - 1)]
    q, latent, up = (torch.ones(options.pop(name, size)) for name, size in sizes.items())
    return D.latent_attention(q, latent, up, mesh=mesh, **options)
