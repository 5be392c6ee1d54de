"""Tests of `plan`: its numbers and choices match the call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks as M
from regard._backends.native import core
from support import HAVE_CORE

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 5, 7, 8, 4


def qkv(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (B, HQ, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV)
    q, k, v = (torch.zeros(size, device=device, dtype=dtype) for size in sizes)
    return q, k, v


MASKS: list[M.Mask | None] = [
    None, M.Causal(), M.Window(2, 0), M.Lengths(torch.tensor([0, 4])),
    M.PerHead([M.Causal(), M.Window(1, 0)] * 3),
]  # fmt: skip


def visible(mask: M.Mask | None) -> int:
    keep = torch.ones(LQ, LK).bool() if mask is None else mask.to_dense(LQ, LK)
    return int(keep.expand(B, HQ, LQ, LK).sum())


@pytest.mark.parametrize("impl", ["native", "torch", "reference"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_useful_work(impl: str, mask: M.Mask | None) -> None:
    if impl == "native" and core.reason_unavailable() is not None:
        pytest.skip(str(core.reason_unavailable()))
    p = regard.plan(*qkv(), mask=mask, impl=impl)
    pairs = visible(mask)
    assert p.impl == impl
    assert p.flops == 2 * pairs * (D + DV)
    assert p.flops_executed >= p.flops
    assert p.fraction == pytest.approx(pairs / (B * HQ * LQ * LK))
    assert set(p.against) == {"native", "torch", "reference"} - {impl}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    size = dtype.itemsize
    lse = 8 if dtype is torch.float64 else 4
    p = regard.plan(q, k, v, sink=torch.zeros(HQ), return_lse=True, mask=M.Lengths(torch.tensor([1, 2])))
    assert p.bytes_read == size * (q.numel() + k.numel() + v.numel()) + 4 * HQ + 8 * B
    assert p.bytes_written == B * HQ * LQ * (DV * size + lse)
    assert p.peak_extra_bytes >= p.bytes_written


def test_the_kernel_within_torch() -> None:
    assert regard.plan(*qkv(), impl="torch").kernel == "sdpa"
    assert regard.plan(*qkv(), impl="torch", softcap=1.0).kernel == "flex"
    assert regard.plan(*qkv(), impl="torch").isa is None
    assert regard.plan(*qkv(), impl="reference").kernel == "float64"


def test_reasons_against_others() -> None:
    p = regard.plan(*qkv(), softcap=1.0, dropout=0.5, impl="reference")
    assert p.against["torch"] == ("SDPA: does not support softcap", "FlexAttention: has no dropout")
    assert regard.plan(*qkv(), impl="reference").against["torch"] == ()


def test_plans_print_as_a_table() -> None:
    lines = str(regard.plan(*qkv(), mask=M.Causal(), impl="torch")).splitlines()
    assert lines[0].split(None, 2) == ["runs", "on", "torch (sdpa)"]
    assert len({line.index(line[15:].lstrip()[:1], 15) for line in lines if line.startswith("not")}) <= 1
    assert any(line.startswith("visible pairs") and "% of the rectangle" in line for line in lines)


@pytest.mark.skipif(not HAVE_CORE, reason="the plans differ without the core")
def test_plans_say_which_backends_are_possible() -> None:
    lines = str(regard.plan(*qkv(), softcap=1.0, impl="torch")).splitlines()
    assert lines[1].split(None, 2) == ["also", "possible", "native, reference"]
    lines = str(regard.plan(*qkv(), softcap=1.0, dropout=0.5, impl="reference")).splitlines()
    assert lines[1].split(None, 2) == ["also", "possible", "native"]
    assert lines[2].startswith("not torch")
    assert lines[2].endswith("SDPA: does not support softcap, FlexAttention: has no dropout")


def test_plans_are_frozen() -> None:
    p = regard.plan(*qkv())
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.impl = "other"  # type: ignore[misc]


def test_meta_tensors_can_be_planned() -> None:
    real, meta = regard.plan(*qkv(), impl="torch"), regard.plan(*qkv("meta"))
    assert (meta.flops, meta.bytes_read, meta.bytes_written) == (
        real.flops,
        real.bytes_read,
        real.bytes_written,
    )


def test_planning_uses_no_random_numbers() -> None:
    state = torch.get_rng_state()
    regard.plan(*qkv(), dropout=0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("change", "message"), [({"impl": "gpu"}, "impl"), ({"softcap": -1.0}, "softcap")])
def test_a_wrong_call_has_no_plan(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regard.plan(*qkv(), **change)


def test_an_empty_call() -> None:
    q, k, v = qkv()
    p = regard.plan(q[:0], k[:0], v[:0], impl="reference")
    assert (p.flops, p.bytes_written, p.fraction) == (0, 0, 0.0)


@pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
def test_few_queries_are_split_along_the_keys() -> None:
    k = torch.zeros(1, 2, 4096, 8)
    one, many = (regard.plan(torch.zeros(1, 8, Lq, 8), k, k, impl="native") for Lq in (1, 64))
    assert (one.cut, many.cut) == ("keys", "queries")
    assert "cut along the keys" in str(one)
    assert regard.plan(torch.zeros(1, 8, 1, 8), k, k, impl="torch").cut == "queries"
