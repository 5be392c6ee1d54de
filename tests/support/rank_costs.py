"""Counts the bytes of distributed calls, as tests of `cost.over_ranks` run them on each rank."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from regard import distributed as D
from regard.cost import CallSpec
from regard.distributed import _group


def bytes_of_passes(mesh: DeviceMesh, call: CallSpec, layout: D.Layout, method: str) -> tuple[int, int]:
    """Returns the bytes that a rank sends in forward, and in forward and backward."""
    rank = mesh.get_rank() if mesh.ndim == 2 else mesh.get_local_rank()
    n, Hkv, Dv = layout.lengths[rank], call.Hkv or call.Hq, call.Dv or call.D
    shapes = ((call.Hq, call.D), (Hkv, call.D), (Hkv, Dv))
    q, k, v = (torch.randn(call.B, H, n, width).to(call.dtype).requires_grad_() for H, width in shapes)
    _group.sent_bytes = 0
    out = D.attention(q, k, v, mesh=mesh, layout=layout, method=method, mask=call.mask)
    forward = _group.sent_bytes
    out.backward(torch.ones_like(out))
    return forward, _group.sent_bytes
