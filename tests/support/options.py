"""Calls of `attention` with each option, by name."""

from __future__ import annotations

from typing import Any

import torch

from regard import masks as M
from regard.scores import Alibi, RelativeBias
from support.forward import Call
from support.strategies import Case


def make(isa: str, *sizes: int, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    """Returns a random call. `sizes` are B, Hq, Hkv, Lq, Lk, D, Dv."""
    B, Hq, Hkv, Lq, Lk, D, Dv = sizes
    q, k, v = torch.randn(B, Hq, Lq, D), torch.randn(B, Hkv, Lk, D), torch.randn(B, Hkv, Lk, Dv)
    return Call(q.to(dtype), k.to(dtype), v.to(dtype), options, isa)


BIAS_SHAPES = [
    (),
    (9,),
    (1, 9),
    (17, 1),
    (17, 9),
    (1, 4, 1, 1),
    (1, 4, 17, 9),
    (2, 1, 1, 9),
    (2, 4, 17, 9),
    (1, 1, 17, 9),
]


def bias_of(kind: str, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    if kind == "tensor":
        return {"bias": torch.randn(*(1 for _ in case.batch), case.heads, case.Lq, case.Lk)}
    if kind == "alibi":
        return {"bias": Alibi(torch.rand(case.heads, dtype=dtype))}
    return {"bias": RelativeBias(torch.randn(8, case.heads), max_distance=9)} if kind == "relative" else {}


def options_of(Hq: int, Lq: int, Lk: int) -> dict[str, dict[str, Any]]:
    """Returns one value of each option by name, for tests of single options and pairs."""
    return {
        "causal": {"mask": M.Causal()},
        "window": {"mask": M.Window(20, 3)},
        "padding": {"mask": M.Lengths(torch.tensor([Lk, Lk // 2]))},
        "dense": {"mask": torch.rand(Lq, Lk) < 0.5},
        "tensor bias": {"bias": torch.randn(1, Hq, Lq, Lk)},
        "row bias": {"bias": torch.randn(2, 1, 1, Lk)},
        "alibi": {"bias": Alibi.standard(Hq)},
        "relative": {"bias": RelativeBias(torch.randn(32, Hq))},
        "softcap": {"softcap": 3.0},
        "sink": {"sink": torch.randn(Hq)},
        "dropout": {"dropout": 0.2, "seed": 3},
        "offset": {"offset": torch.tensor([1, 30])},
        "scale": {"scale": 0.2},
    }


NAMES = list(options_of(1, 1, 1))
