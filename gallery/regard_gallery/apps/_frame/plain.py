"""Makes a model use PyTorch's attention, for `--attention torch` and to compare step times."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.masks import Causal, Mask
from regard.nn import Attention, Graph, GraphAttention
from regard.positions import Rotary


class PlainAttention(Attention):
    """An `Attention` layer that calls PyTorch's `scaled_dot_product_attention`."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        if options.get("cu_seqlens") is not None:
            raise ValueError("cu_seqlens: expected None with attention by PyTorch, got packed sequences")
        return super().forward(x, *args, **options)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, dropout: float = 0.0
    ) -> Tensor:
        bias = None if isinstance(self.position, Rotary) else self.position
        for name, option in (("softcap", self.softcap), ("sink", self.sink), ("position", bias)):
            if option is not None:
                raise ValueError(f"{name}: expected None with attention by PyTorch, got {option!r}")
        causal = mask == Causal() and q.shape[-2] == k.shape[-2]
        keep = None if mask is None or causal else _dense(mask, q.shape[-2], k.shape[-2])
        return F.scaled_dot_product_attention(
            q, k, v, keep, dropout, causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip


class PlainGraphAttention(GraphAttention):
    """A `GraphAttention` layer that uses PyTorch's gather and scatter operations.

    It allocates a tensor (E, H, d_head) for E edges and H heads, which `GraphAttention` does not.
    """

    def attend(self, h: Tensor, graph: Graph) -> Tensor:
        source, target = graph.edges
        a, b = ((h * vector[:, None]).sum(-1).T for vector in (self.source, self.target))  # (n, H)
        scores = F.leaky_relu(a[source] + b[target], self.slope)
        at = target[:, None].expand_as(scores)
        largest = a.new_full(a.shape, -torch.inf).scatter_reduce(0, at, scores.detach(), "amax")
        w = (scores - largest[target]).exp()
        w = F.dropout(w / torch.zeros_like(a).index_add(0, target, w)[target], self.dropout, self.training)
        values = h.transpose(0, 1)
        return torch.zeros_like(values).index_add(0, target, w[:, :, None] * values[source]).transpose(0, 1)


KINDS = {Attention: PlainAttention, GraphAttention: PlainGraphAttention}


@lru_cache(maxsize=4)
def _dense(mask: Mask, Lq: int, Lk: int) -> Tensor:
    """Returns a mask as a bool tensor (Lq, Lk).

    Results are cached, because all layers of a training step use the same mask.
    """
    return mask.to_dense(Lq, Lk)


def plain(model: nn.Module) -> nn.Module:
    """Makes every attention layer of `model` use PyTorch, and returns the same model.

    The parameters do not change.
    """
    layers = [module for module in model.modules() if type(module) in KINDS]
    if not layers:
        raise ValueError(f"model: expected attention of {[kind.__name__ for kind in KINDS]}, got none")
    for module in layers:
        module.__class__ = KINDS[type(module)]
    for module in model.modules():
        if hasattr(module, "packed"):  # SDPA cannot process packed sequences, so they are padded
            module.packed = False  # type: ignore[assignment]
    return model
