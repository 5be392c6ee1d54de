"""Attention of few query rows over many keys, in tensors and in storage, against float64."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import masks as M
from regard._api import stored as _decode
from regard._api.stored import attend_stored
from regard._backends.native import core, stored as _stored
from regard._call.spec import Options
from regard._call.stored import Stored
from regard.scores import Alibi, RelativeBias
from support import HAVE_CORE, rel_l2
from support.forward import DTYPES, Call, Sampler, faults
from support.stored import KINDS, quantised, store

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

ROWS, SHARED = (1, 1, 2, 3, 5, 16), (1, 2, 4, 8, 32)
KEYS = (1, 3, 17, 63, 65, 97, 129, 513, 1025, 4097)
SIZES = (*range(1, 131, 2), 8, 64, 96, 128, 576)


class FewRows(Sampler):
    """Samples calls with shapes that the decode kernel handles."""

    def sizes(self, work: float) -> None:
        while True:
            self.batch = self.choice(((1,), (2,), (3,), ()))
            self.Hkv, group = self.choice((1, 2, 3)), self.choice(SHARED)
            self.Hq = self.Hkv * group
            self.Lq, self.Lk = self.choice(ROWS), self.choice(KEYS)
            self.D = self.choice(SIZES)
            self.Dv = self.D if self.chance(0.5) else self.choice(SIZES)
            few = self.Lq * group <= 64
            if few and self.Hq * self.Lq * self.Lk * (self.D + self.Dv) * 3 <= work:
                return


def grid(seeds: range, work: float) -> str:
    calls = ((seed, FewRows(seed, work, core.isas()).call()) for seed in seeds)
    return "\n".join(f"seed {n}: {'; '.join(f)} in {c}" for n, c in calls if (f := faults(c)))


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_grid(first: int, poison: None) -> None:
    report = grid(range(first, first + 40), 4e6)
    assert not report, report


@pytest.mark.full
@pytest.mark.parametrize("first", range(240, 3240, 100))
def test_large_grid(first: int, poison: None) -> None:
    report = grid(range(first, first + 100), 6e7)
    assert not report, report


def tensors(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random q, k and v. `sizes` are B, Hq, Hkv, Lq, Lk, D, Dv."""
    B, Hq, Hkv, Lq, Lk, D, Dv = sizes
    q, k, v = torch.randn(B, Hq, Lq, D), torch.randn(B, Hkv, Lk, D), torch.randn(B, Hkv, Lk, Dv)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def native(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return regard.attention(q, k, v, impl="native", **options)


OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"mask": M.Causal()},
    "window with sinks": {"mask": M.streaming(40, 3)},
    "dilated": {"mask": M.Dilated(3)},
    "random": {"mask": M.RandomBlocks(3, 16, seed=1)},
    "by head": {"mask": M.PerHead([M.Causal(), M.Window(50, 0), M.Prefix(7), M.Dilated(2)])},
    "lengths": {"mask": M.Lengths([1100, 700])},
    "offsets": {"mask": M.Causal(), "offset": torch.tensor([1099, 513])},
    "alibi": {"bias": Alibi.standard(4), "mask": M.Causal()},
    "relative": {"bias": RelativeBias(torch.randn(32, 4))},
    "softcap and sink": {"softcap": 3.0, "sink": torch.randn(4)},
    "dropout": {"dropout": 0.3, "seed": 5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("Lq", [1, 5, 7])  # 2, 10, 14 rows per key head: with and without panels
def test_threads_and_batches_do_not_change_a_bit(isa: str, name: str, Lq: int) -> None:
    q, k, v = tensors(2, 4, 2, Lq, 1100, 24, 16)
    options = OPTIONS[name]
    assert not faults(Call(q, k, v, options, isa))
    torch.set_num_threads(1)
    single_threaded = native(q, k, v, **options)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(native(q, k, v, **options), single_threaded)
    if name in ("lengths", "offsets", "dropout"):
        return
    assert torch.equal(native(q[1:], k[1:], v[1:], **options), single_threaded[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_the_width_of_a_vector_changes_no_bit(dtype: torch.dtype, group: int) -> None:
    if not {"avx2", "avx512"} <= {*core.isas()}:
        pytest.skip("needs a CPU with AVX-512")
    for D, Lk in ((64, 1100), (40, 97), (3, 513), (130, 33)):
        q, k, v = tensors(2, 2 * group, 2, 1, Lk, D, 64, dtype=dtype)
        results = []
        for name in ("avx2", "avx512"):
            with core.use_isa(name):
                results.append(
                    native(q, k, v, mask=M.Lengths([Lk, Lk // 2 + 1]), bias=Alibi.standard(2 * group))
                )
        assert torch.equal(*results), (D, Lk)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_keys(isa: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(2, 8, 2, 1, 600, 40, 24, dtype=dtype)
    want = native(q, k, v)
    for layout in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
        assert torch.equal(native(q, layout(k), layout(v)), want)


def test_masked_keys_may_be_nan(isa: str) -> None:
    q, k, v = tensors(2, 8, 2, 3, 1100, 16, 16)
    mask = M.Lengths([1000, 530]) & M.Causal()
    options: dict[str, Any] = {"mask": mask, "offset": torch.tensor([997, 527])}
    want = native(q, k, v, **options)
    for x in (k, v):
        x[0, :, 1000:] = float("nan")
        x[1, :, 530:] = float("inf")
    assert torch.equal(native(q, k, v, **options), want)
    v[0, 0, 995] = float("nan")  # all rows of the first group of heads attend to it
    out = native(q, k, v, **options)
    assert out[0, :4].isnan().all()
    assert torch.equal(out[0, 4:], want[0, 4:])
    assert torch.equal(out[1], want[1])


def test_scores_beyond_float32(isa: str) -> None:
    q, k, v = tensors(1, 4, 2, 1, 700, 8, 8)
    call = Call(q * 1e25, k * 1e25, v, {}, isa)
    assert rel_l2(call.run()[0], call.expected()[0]) < 1e-6


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_error_beside_the_fused_kernel(isa: str, rows: int) -> None:
    q, k, v = tensors(8, 32, 32 // rows, 1, 600, 64, 64)
    assert not faults(Call(q, k, v, {}, isa))


# Stored keys


STORED_OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": M.Causal()},
    {"mask": M.streaming(20, 3), "sink": torch.randn(8)},
    {"mask": M.Causal(), "offset": torch.tensor([90, 40]), "softcap": 3.0},
    {"bias": Alibi.standard(8), "mask": M.Lengths([97, 33])},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_keys(isa: str, kind: str, page: int, dtype: torch.dtype, poison: None) -> None:
    # 4, 12, 68, 1 and 3 query rows per key head: a row that is left over has its own kernel
    for Hkv, Lq, D, Dv in ((2, 1, 40, 40), (2, 3, 128, 64), (2, 17, 33, 130), (8, 1, 70, 40), (8, 3, 40, 70)):
        q, k, v = tensors(2, 8, Hkv, Lq, 97, D, Dv, dtype=dtype)
        stored = store(k, v, kind, page)
        dense = stored.dense(torch.float32 if kind != "float" else dtype)
        for options in STORED_OPTIONS:
            for _ in range(2):  # the second call skips the checks
                out, lse = attend_stored(q, stored, Options(**options, return_lse=True), impl="native")
                exact = Call(q.float(), *(x.float() for x in dense), options, isa)
                want, want_lse = exact.expected()
                limit = 2e-6 + 1.01 * rel_l2(want.to(dtype), want)
                assert rel_l2(out, want) <= limit, (Hkv, Lq, D, options)
                torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paging_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(2, 8, 2, 1, 1100, 64, 64, dtype=dtype)
    want = native(q, k, v)
    for page in (0, 16, 128, 1024):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(attend_stored(q, store(k, v, "float", page), impl="native"), want)


def test_growing_length_skips_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(2, 8, 2, 1, 70, 64, 64)
    stored = store(k, v, "float", 0)
    attend_stored(q, stored._replace(length=1), impl="native")
    monkeypatch.setattr(_decode, "make", None)
    for length in range(1, 71):
        want = native(q, k[:, :, :length], v[:, :, :length])
        assert torch.equal(attend_stored(q, stored._replace(length=length), impl="native"), want)


def test_offsets_of_every_kind_in_repeated_calls() -> None:
    q, k, v = tensors(2, 8, 2, 1, 70, 64, 64)
    stored = store(k, v, "float", 0)
    for offset in (None, 3, 50, np.int64(7), torch.tensor([5, 60]), torch.tensor([9, 2], dtype=torch.int32)):
        want = native(q, k, v, mask=M.Causal(), offset=offset)
        for _ in range(2):
            assert torch.equal(attend_stored(q, stored, Options(mask=M.Causal(), offset=offset)), want)
    for wrong in (2**49, torch.tensor([2**49, 0]), torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match="offset"):
            attend_stored(q, stored, Options(mask=M.Causal(), offset=wrong))


def test_invalid_storage_raises(isa: str) -> None:
    q, k, v = tensors(2, 8, 2, 1, 70, 64, 64)
    stored = store(k, v, "float", 16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"stored\.length: expected 0 to 112"):
            attend_stored(q, stored._replace(length=113), impl="native")
        assert stored.table is not None
        table = stored.table.clone()
        table[1, 2] = 13
        with pytest.raises(ValueError, match=r"stored\.table: expected page numbers from 0 to 12"):
            attend_stored(q, stored._replace(table=table), impl="native")
        attend_stored(q, stored, impl="native")
    with pytest.raises(ValueError, match=r"stored\.page: expected a power of two"):
        attend_stored(q, stored._replace(page=24), impl="native")
    with pytest.raises(ValueError, match=r"stored\.kind"):
        attend_stored(q, stored._replace(kind="int2"), impl="native")
    with pytest.raises(ValueError, match=r"stored\.k_scale: expected float16"):
        attend_stored(q, store(k, v, "int8", 0)._replace(k_scale=None), impl="native")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writing(isa: str, kind: str, page: int, dtype: torch.dtype) -> None:
    """The core and `Stored.write` write the same bits. Other rows do not change."""
    starts, counts = [3, 14], [9, 20]
    for D, Dv, size in ((1, 33, 1.0), (40, 64, 1e-7), (97, 32, 1e4)):
        _, k, v = tensors(2, 2, 2, 1, 40, D, Dv)
        _, new_k, new_v = tensors(2, 2, 2, 1, 21, D, Dv)
        new_k[0, 0, 3], new_v[0, 1, 2] = 0.25, 0
        new_k[1, 1, 5, 0], new_v[0, 0, 7, 1], new_v[0, 0, 8, 2] = torch.nan, torch.inf, -torch.inf
        new_k, new_v = (new_k * size).to(dtype), (new_v * size).to(dtype).mT.contiguous().mT
        stored = store(k.to(dtype), v.to(dtype), kind, page)
        native_copy = Stored(*(x.clone() if isinstance(x, Tensor) else x for x in stored))
        stored.write(starts, counts, new_k, new_v)
        _stored.write(native_copy, starts, counts, new_k, new_v)
        pairs = (
            (stored.k, native_copy.k),
            (stored.v, native_copy.v),
            *zip(stored.dense(dtype), native_copy.dense(dtype), strict=True),
        )
        for x, y in pairs:
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


PAGES = 4


def empty_pages(kind: str, *table: int) -> Stored:
    """Returns storage of PAGES pages of zeros. The memory also has a page before and a page after them."""
    codes, scale = quantised(torch.zeros(PAGES + 2, 2, 16, 16), kind)
    k, v = codes.clone()[1:-1], codes.clone()[1:-1]
    k_scale, v_scale = (None, None) if scale is None else (scale.clone()[1:-1], scale.clone()[1:-1])
    pages = torch.tensor([table], dtype=torch.int32)
    return Stored(k, v, k_scale, v_scale, pages, 16, kind, 16 * len(table), 16, 16)


def test_threads_do_not_change_written_bits() -> None:
    _, k, v = tensors(1, 8, 8, 1, 2000, 64, 64)
    stores = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        stored = store(torch.zeros_like(k), torch.zeros_like(v), "int8", 0)
        _stored.write(stored, [0], [2000], k, v)
        stores.append(stored)
    for other in stores[1:]:
        assert torch.equal(stores[0].k, other.k)
        assert torch.equal(stores[0].v_scale, other.v_scale)


@pytest.mark.parametrize("kind", KINDS)
def test_writing_to_the_first_and_last_pages(kind: str) -> None:
    _, k, v = tensors(1, 2, 2, 1, 32, 16, 16)
    stored = empty_pages(kind, 0, PAGES - 1)
    _stored.write(stored, [0], [32], k, v)
    want = store(torch.zeros_like(k), torch.zeros_like(v), kind, 0)
    want.write([0], [32], k, v)
    for x, y in zip(stored.dense(k.dtype), want.dense(k.dtype), strict=True):
        assert torch.equal(x, y[:, :, :32])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [-(2**31), -2, -1, PAGES, PAGES + 1, 99, 2**31 - 1])
def test_writing_to_an_invalid_page_raises(kind: str, page: int) -> None:
    """A write to one page too many would change memory that belongs to another tensor."""
    _, k, v = tensors(1, 2, 2, 1, 32, 16, 16)
    stored = empty_pages(kind, 1, page)
    with pytest.raises(IndexError, match="table: expected pages that exist"):
        _stored.write(stored, [10], [20], k, v)
    for x in (stored.k, stored.v, stored.k_scale, stored.v_scale):
        if x is not None:
            around = x._base
            assert around is not None
            assert not around[0].any()
            assert not around[-1].any()
    with pytest.raises(ValueError, match=r"stored\.table: expected page numbers from 0 to 3"):
        attend_stored(torch.randn(1, 2, 1, 16), stored, impl="native")


@pytest.mark.parametrize("impl", ["auto", "reference", "torch"])
def test_backends_agree(impl: str) -> None:
    q, k, v = tensors(2, 8, 2, 1, 97, 64, 64)
    for kind in KINDS:
        stored = store(k, v, kind, 16)
        want = attend_stored(q, stored, Options(mask=M.Window(50, 0)), impl="native")
        assert isinstance(want, Tensor)
        out = attend_stored(q, stored, Options(mask=M.Window(50, 0)), impl=impl)
        assert rel_l2(out, want) < 2e-6
        grad_q = q.clone().requires_grad_()
        attend_stored(grad_q, stored, Options(mask=M.Window(50, 0))).sum().backward()
        assert grad_q.grad is not None


def test_groups_of_32_are_more_accurate_than_rows() -> None:
    """One scale per 32 channels gives a smaller error than one scale per row of 128 channels."""
    x = torch.randn(4096, 128)
    row = x.abs().amax(-1, keepdim=True)
    int8_row = rel_l2((x / row * 127).round() * row / 127, x)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    int4_row = rel_l2(((x - low) / (high - low) * 15).round() * (high - low) / 15 + low, x)
    grouped = {}
    for kind in ("int8", "int4"):
        stored = store(x[None, None], x[None, None], kind, 0)
        grouped[kind] = rel_l2(stored.dense(torch.float32)[0][0, 0], x)
    assert grouped["int8"] < 0.0056 < 0.0062 < int8_row < 0.0067
    assert grouped["int4"] < 0.081 < 0.096 < int4_row < 0.103


def test_overhead_of_a_repeated_call() -> None:
    """A step on stored keys takes some microseconds of CPU time, even if each has a new length."""
    q, k, v = tensors(1, 1, 1, 1, 8, 8, 8)
    stores = [store(k, v, "float", 0)._replace(length=n) for n in range(1, 9)]
    fastest = float("inf")
    for _ in range(300):
        begin = time.thread_time()
        for stored in stores:
            attend_stored(q, stored)
        fastest = min(fastest, (time.thread_time() - begin) / len(stores))
    assert fastest < 40e-6, f"{fastest * 1e6:.1f} us"
