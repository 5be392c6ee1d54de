"""Attention layers that also return their weights. The weights are computed from recorded calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import packing
from .._api.attention import weights
from .._tools.listeners import listening
from .._tools.watching import uncompiled

REASON = (
    "return_weights=True breaks the graph; arguments() and regard.weights give the weights without a break"
)


@partial(uncompiled, reason=REASON)
def with_weights(
    forward: Callable[[], Any], cu_seqlens: Tensor | None, context_cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs `forward`, which calls `regard.attention`. Returns its output and the call's weights.

    The weights are those of `regard.weights` before dropout, (..., H, Lq, Lk). For packed
    sequences they are padded, (N, H, Lq, Lk). A listener computes them, so that masks, biases and
    the keys of a cache are exactly those of the call. `torch.compile` breaks the graph here.
    """
    recorded: list[Tensor] = []
    thread = threading.get_ident()

    def record(q: Tensor, k: Tensor, options: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            recorded.append(weights(q, k, k, **options))  # weights do not depend on the values

    with listening(record):
        out = forward()
    if cu_seqlens is not None:
        return out, _padded(
            recorded, cu_seqlens, cu_seqlens if context_cu_seqlens is None else context_cu_seqlens
        )
    if len(recorded) != 1:
        raise RuntimeError(
            f"return_weights: expected a layer and a cache that call regard.attention once, got "
            f"{len(recorded)} calls"
        )
    return out, recorded[0]


def _padded(recorded: list[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Returns the weights of packed sequences as (N, H, Lq, Lk). Padded rows and columns are zero.

    There is one recorded call (H, total_q, total_k) for the whole row, or one call for each
    sequence.
    """
    sizes_q, sizes_k = packing.lengths(cu_seqlens_q).tolist(), packing.lengths(cu_seqlens_k).tolist()
    if len(recorded) == 1:
        rows = zip(recorded[0].split(sizes_q, -2), range(len(sizes_k)), strict=True)
        recorded = [x.split(sizes_k, -1)[sequence] for x, sequence in rows]
    Lq, Lk = max(sizes_q), max(sizes_k)
    padded = [F.pad(w, (0, Lk - w.shape[-1], 0, Lq - w.shape[-2])) for w in recorded]
    return torch.stack(padded)
