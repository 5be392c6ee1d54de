"""Calls of `attention` as functions of all differentiable inputs, for gradcheck and transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard import masks as M
from regard.scores import Alibi, RelativeBias

B, HQ, HKV, LQ, LK, D, DV = 2, 4, 2, 3, 5, 2, 3
LENGTHS = torch.tensor([2, 5])


class Case(NamedTuple):
    inputs: tuple[Tensor, ...]  # q, k, v, then bias, slopes, table or sink
    options: Callable[..., dict[str, Any]]  # takes the inputs after v

    def __call__(self, *inputs: Tensor, **extra_options: Any) -> Any:
        q, k, v, *parameters = inputs
        return regard.attention(q, k, v, **self.options(*parameters) | extra_options)

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(x.detach().clone().requires_grad_() for x in self.inputs)


def tensors(*batch: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    sizes = ((HQ, LQ, D), (HKV, LK, D), (HKV, LK, DV))
    return tuple(torch.randn(*batch, *size, dtype=dtype) for size in sizes)


def strided(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns q, k and v stored as (B, L, H, D)."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(B, dtype=dtype))


def constant(**options: Any) -> Callable[..., dict[str, Any]]:
    return lambda *parameters: options


def everything(bias: Tensor, sink: Tensor) -> dict[str, Any]:
    mask = M.Lengths(LENGTHS) & (M.Causal() | M.Prefix(2))
    return {"mask": mask, "bias": bias, "sink": sink, "softcap": 2.0, "dropout": 0.3, "seed": 5, "scale": 0.7}


def cases(dtype: torch.dtype = torch.float64) -> dict[str, Case]:
    q, k, v = tensors(B, dtype=dtype)
    bias, row = torch.randn(B, HQ, LQ, LK, dtype=dtype), torch.randn(1, LK, dtype=dtype)
    slopes, table = torch.rand(HQ, dtype=dtype), torch.randn(8, HQ, dtype=dtype)
    sink = torch.randn(HQ, dtype=dtype)
    ids, keep = torch.arange(LK) // 2, torch.rand(1, HQ, LQ, LK) > 0.3
    patterns = torch.tensor([[[False] * 2] * 2, [[True] * 2] * 2, [[True, False], [True, True]]])
    per_head = M.PerHead([M.Causal(), M.Window(1, 0), M.Window(2, 2), M.Prefix(2)])
    return {
        "plain": Case((q, k, v), constant()),
        "strided": Case(strided(dtype), constant()),
        "causal": Case((q, k, v), constant(mask=M.Causal())),
        "window from 0": Case((q, k, v), constant(mask=M.Window(1, 1), offset=0)),
        "lengths": Case((q, k, v), constant(mask=M.Lengths(LENGTHS))),
        "offsets": Case((q, k, v), constant(mask=M.Causal(), offset=LENGTHS - 2)),
        "documents": Case((q, k, v), constant(mask=M.Documents(ids) & M.Causal())),
        "dense": Case((q, k, v), constant(mask=keep)),
        "blocks": Case((q, k, v), constant(mask=M.Blocks(torch.tensor([[True, False, True]] * 2), 2))),
        "block patterns": Case((q, k, v), constant(mask=M.BlockPatterns([[2, 0, 1]] * 2, patterns))),
        "global": Case((q, k, v), constant(mask=M.Global([0, 3]) | M.Window(1, 0))),
        "sparse": Case(
            (q, k, v), constant(mask=(M.RandomBlocks(1, 2) | M.Dilated(2)) & M.Not(M.Window(0, 0)))
        ),
        "per head": Case((q, k, v), constant(mask=per_head)),
        "bias": Case((q, k, v, bias), lambda bias: {"bias": bias}),
        "bias of keys": Case((q, k, v, row), lambda row: {"bias": row}),
        "alibi": Case((q, k, v, slopes), lambda slopes: {"bias": Alibi(slopes)}),
        "relative": Case((q, k, v, table), lambda table: {"bias": RelativeBias(table, max_distance=4)}),
        "sink": Case((q, k, v, sink), lambda sink: {"sink": sink, "mask": M.Window(0, 0), "offset": -1}),
        "softcap": Case((q, k, v), constant(softcap=0.8)),
        "dropout": Case((q, k, v), constant(dropout=0.4, seed=3)),
        "rank 2": Case((q[0, 0], k[0, 0], v[0, 0]), constant(mask=M.Causal())),
        "rank 3": Case((q[0], k[0], v[0]), constant(mask=M.Causal())),
        "rank 5": Case((q[:1, None], k[:, None], v[:1, None]), constant(mask=M.Causal())),
        "everything": Case((q, k, v, row, sink), everything),
    }


NAMES = tuple(cases())
