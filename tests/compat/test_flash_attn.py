"""`regard.compat.flash_attn` against the definition in float64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard._call.stored import Stored
from regard.compat import flash_attn as F, flash_attn_interface
from support import HAVE_CORE
from support.flash import packed_reference, padded_reference, reference, rotation, signature, slopes_of
from support.tracing import Function, check_traced

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": (-1, 2)},
    "window": {"window_size": (2, 1)},
    "causal-window": {"causal": True, "window_size": (3, 5)},
    "itself": {"window_size": (0, 0)},
    "softcap": {"softcap": 1.5, "causal": True},
    "scale": {"softmax_scale": 0.3},
    "alibi": {"alibi_slopes": "heads"},
    "alibi-causal": {"alibi_slopes": "heads", "causal": True, "window_size": (4, -1)},
    "alibi-sample": {"alibi_slopes": "samples", "causal": True},
}
SIZES = {  # B, Lq, Lk, Hq, Hkv, D
    "square": (2, 7, 7, 3, 3, 8),
    "more-keys": (2, 3, 9, 4, 2, 5),
    "more-queries": (1, 9, 4, 4, 1, 8),
    "one-query": (3, 1, 11, 6, 3, 16),
    "many": (1, 65, 70, 2, 1, 16),
}
LENGTHS = {"same": ((5, 0, 3, 9), None), "other": ((2, 4, 1), (7, 2, 6)), "none": ((3, 2), (0, 5))}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def options_of(name: str, B: int, H: int) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(B, H) if options["alibi_slopes"] == "samples" else torch.rand(H)
    return options


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def check(result: Any, expected: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """Compares out, the LSE and the gradients of `leaves`."""
    out, lse = result[:2]
    tolerance = {"rtol": 0, "atol": TOLERANCE[leaves[0].dtype]}
    torch.testing.assert_close(out.double(), expected[0], **tolerance)
    torch.testing.assert_close(lse.double(), expected[1], **tolerance)
    dout = torch.randn_like(expected[0])
    actual = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    for a, b in zip(actual, torch.autograd.grad(expected[0], leaves, dout), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance["atol"], atol=tolerance["atol"] * 4)


# Padded batches


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_func(name: str, size: str) -> None:
    B, Lq, Lk, Hq, Hkv, D = SIZES[size]
    leaves = inputs((B, Lq, Hq, D), (B, Lk, Hkv, D), (B, Lk, Hkv, D))
    options = options_of(name, B, Hq)
    check(
        F.flash_attn_func(*leaves, **options, return_attn_probs=True),
        padded_reference(*leaves, **options),
        leaves,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_func_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    leaves = inputs((2, 5, 4, 8), (2, 8, 2, 8), (2, 8, 2, 8), dtype=dtype)
    options = options_of(name, 2, 4)
    check(
        F.flash_attn_func(*leaves, **options, return_attn_probs=True),
        padded_reference(*leaves, **options),
        leaves,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_tensors(name: str) -> None:
    options = options_of(name, 2, 4)
    (qkv,) = inputs((2, 6, 3, 4, 8))
    check(
        F.flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True),
        padded_reference(*qkv.unbind(2), **options),
        [qkv],
    )
    q, kv = inputs((2, 3, 4, 8), (2, 6, 2, 2, 8))
    check(
        F.flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True),
        padded_reference(q, *kv.unbind(2), **options),
        [q, kv],
    )


def test_only_out_without_return_attn_probs() -> None:
    q, k, v = inputs((2, 5, 2, 4), (2, 5, 2, 4), (2, 5, 2, 3))
    out = F.flash_attn_func(q, k, v, causal=True)
    assert out.shape == (2, 5, 2, 3)
    assert out.is_contiguous()
    out, lse, probs = F.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 2, 5)
    assert probs.shape == (0,)


@pytest.mark.parametrize("name", ["plain", "causal", "alibi-sample"])
def test_dropout(name: str) -> None:
    """S_dmask holds the weights before dropout; the sign says which of them were dropped."""
    q, k, v = inputs((2, 40, 2, 4), (2, 40, 1, 4), (2, 40, 1, 4))
    options = options_of(name, 2, 2)
    out, lse, probs = F.flash_attn_func(q, k, v, 0.25, **options, return_attn_probs=True)
    weights = probs.clamp(min=0) / 0.75
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", weights, v.expand(2, 40, 2, 4)))
    torch.testing.assert_close(lse, padded_reference(q, k, v, **options)[1])
    torch.testing.assert_close(probs.abs().sum(-1), torch.ones(2, 2, 40, dtype=torch.float64))
    assert 0.15 < ((probs < 0).sum() / (probs != 0).sum()).item() < 0.35


def test_dropout_follows_the_seed_of_pytorch() -> None:
    q, k, v = inputs((1, 9, 2, 4), (1, 9, 2, 4), (1, 9, 2, 4))
    torch.manual_seed(1)
    first = F.flash_attn_func(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, F.flash_attn_func(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, F.flash_attn_func(q, k, v, dropout_p=0.5))


def test_wrong_rank_names_the_layout() -> None:
    with pytest.raises(ValueError, match=r"k: expected \(B, L, H, D\), got"):
        F.flash_attn_func(torch.randn(1, 2, 3, 4), torch.randn(2, 3, 4), torch.randn(1, 2, 3, 4))


def test_no_square_memory() -> None:
    """The LSE of 40,000 keys: the scores alone would take 6 GB."""
    q = torch.randn(1, 40_000, 1, 8)
    out, lse, _ = F.flash_attn_func(q, q, q, window_size=(8, 8), return_attn_probs=True)
    assert out.shape == q.shape
    assert lse.isfinite().all()


# Packed sequences


def cu(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_varlen(name: str, lengths: str) -> None:
    lengths_q, lengths_k = LENGTHS[lengths]
    lengths_k = lengths_k or lengths_q
    q, k, v = inputs((sum(lengths_q), 4, 8), (sum(lengths_k), 2, 8), (sum(lengths_k), 2, 8))
    options = options_of(name, len(lengths_q), 4)
    sizes = (cu(lengths_q), cu(lengths_k), max(lengths_q), max(lengths_k))
    result = F.flash_attn_varlen_func(q, k, v, *sizes, **options, return_attn_probs=True)
    assert result[2].shape == (0,)
    check(result, packed_reference(q, k, v, lengths_q, lengths_k, **options), [q, k, v])


@pytest.mark.parametrize("name", OPTIONS)
def test_varlen_of_packed_tensors(name: str) -> None:
    lengths_q, lengths_k = (3, 5, 1), (4, 5, 2)
    options = options_of(name, 3, 4)
    (qkv,) = inputs((9, 3, 4, 8))
    result = F.flash_attn_varlen_qkvpacked_func(qkv, cu(lengths_q), 5, **options, return_attn_probs=True)
    check(result, packed_reference(*qkv.unbind(1), lengths_q, lengths_q, **options), [qkv])
    q, kv = inputs((9, 4, 8), (11, 2, 2, 8))
    sizes = (cu(lengths_q), cu(lengths_k), 5, 5)
    result = F.flash_attn_varlen_kvpacked_func(q, kv, *sizes, **options, return_attn_probs=True)
    check(result, packed_reference(q, *kv.unbind(1), lengths_q, lengths_k, **options), [q, kv])


def test_varlen_dropout() -> None:
    q, k, v = inputs((15, 2, 4), (15, 2, 4), (15, 2, 4))
    out, lse, probs = F.flash_attn_varlen_func(
        q, k, v, cu((6, 9)), cu((6, 9)), 9, 9, 0.5, causal=True, return_attn_probs=True
    )
    assert probs.shape == (2, 2, 9, 9)
    assert not probs[0, :, 6:].any()
    assert not probs[0, :, :, 6:].any()
    expected = torch.einsum("hij,jhd->ihd", probs[1].clamp(min=0) * 2, v[6:])
    torch.testing.assert_close(out[6:], expected)
    assert lse.shape == (2, 15)
    assert (probs < 0).any()


# Caches


def pages_of(rows: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Copies rows (B, capacity, H, D) to shuffled pages. Returns the pages and the block table."""
    B, n = len(rows), rows.shape[1] // page
    table = torch.randperm(B * n + 3)[: B * n].reshape(B, n)
    pages = torch.full((B * n + 3, page, *rows.shape[2:]), float("nan"), dtype=rows.dtype)
    pages[table] = rows.unflatten(1, (n, page))
    return pages, table.int()


def tables_of(length: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(length, half, dtype=torch.float64) * 6
    return angles.cos(), angles.sin()


STORAGES = ("rows", "page16", "index", "int")
CACHE_CASES = [
    # options, storage, Lq, new tokens, rotary (interleaved or not)
    *[(name, "rows", 1, 1, None) for name in OPTIONS],
    *[(name, "page16", 1, 1, None) for name in OPTIONS],
    *[(name, "page6", 3, 3, True) for name in OPTIONS],
    *[(name, "index", 2, 2, False) for name in OPTIONS],
    *[(name, "leftpad", 2, 1, True) for name in OPTIONS],
    *[(name, storage, 2, 0, None) for name in OPTIONS for storage in ("rows", "page16")],
    *[("causal", storage, 1, 4, rotary) for storage in STORAGES for rotary in (None, True, False)],
    *[("causal", storage, 4, 4, rotary) for storage in STORAGES for rotary in (None, True, False)],
    *[("plain", storage, 3, 2, True) for storage in STORAGES],
    *[("causal", storage, 40, 40, None) for storage in STORAGES],
]  # fmt: skip


CAPACITY, HQ, HKV, D = 96, 4, 2, 8
INDEX = torch.tensor([4, 0, 2])


def stored(storage: str, rows: list[Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """Copies rows (B, CAPACITY, HKV, D) to a cache. Returns it and the arguments that describe it."""
    if storage.startswith("page"):
        pages, table = pages_of(torch.cat(rows, -1), int(storage[4:]))
        return [x.contiguous() for x in pages.split(D, -1)], {"block_table": table}
    if storage == "index":
        caches = [torch.full((5, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in rows]
        for cache, x in zip(caches, rows, strict=True):
            cache[INDEX] = x
        return caches, {"cache_batch_idx": INDEX.int()}
    return [x.clone() for x in rows], {
        "cache_leftpad": torch.tensor([0, 3, 3])
    } if storage == "leftpad" else {}


def restored(storage: str, cache: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Returns the cache as rows (B, CAPACITY, HKV, D)."""
    if storage.startswith("page"):
        return cache[arguments["block_table"].long()].flatten(1, 2)
    return cache[INDEX] if storage == "index" else cache


@pytest.mark.parametrize(("name", "storage", "Lq", "L", "rotary"), CACHE_CASES)
def test_kvcache(name: str, storage: str, Lq: int, L: int, rotary: bool | None) -> None:
    options = options_of(name, 3, HQ)
    q, k, v = (torch.randn(3, n, H, D, dtype=torch.float64) for n, H in ((Lq, HQ), (L, HKV), (L, HKV)))
    lengths = [9, 9, 9] if storage == "int" else [Lq if Lq > L else 0, 17, 50]
    rows = [torch.randn(3, CAPACITY, HKV, D, dtype=torch.float64) for _ in range(2)]
    cos, sin = tables_of(CAPACITY, 3)
    outs, lses, updated = [], [], [x.clone() for x in rows]
    for b, n in enumerate(lengths):
        queries, keys = q[b], k[b]
        if rotary is not None:
            advance = "causal" in options or "window_size" in options
            queries, keys = (
                rotation(queries, cos, sin, n, rotary, advance),
                rotation(keys, cos, sin, n, rotary),
            )
        for x, new, target in zip(rows, (keys, v[b]), updated, strict=True):
            target[b, n : n + L] = new
            x[b, n:] = target[b, n + L :] = float("nan")  # what is behind the keys must not matter
        of_sample = options | {"alibi_slopes": slopes_of(options.get("alibi_slopes"), b)}
        of_sample["first"] = 3 if storage == "leftpad" and b else 0
        out, lse = reference(queries, *(x[b, : n + L] for x in updated), **of_sample)
        outs.append(out)
        lses.append(lse)
    caches, arguments = stored(storage, rows)
    arguments |= {"cache_seqlens": lengths[0] if storage == "int" else torch.tensor(lengths).int()}
    arguments |= {"k": k, "v": v} if L else {}
    arguments |= (
        {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary} if rotary is not None else {}
    )
    out, lse = F.flash_attn_with_kvcache(q, *caches, **arguments, **options, return_softmax_lse=True)
    torch.testing.assert_close(out, torch.stack(outs), rtol=0, atol=1e-9)
    torch.testing.assert_close(lse, torch.stack(lses), rtol=0, atol=1e-9)
    for cache, x in zip(caches, updated, strict=True):
        torch.testing.assert_close(restored(storage, cache, arguments), x, rtol=0, atol=1e-12, equal_nan=True)


def test_kvcache_is_full_by_default() -> None:
    q, k, v = (torch.randn(2, n, 2, 4, dtype=torch.float64) for n in (3, 20, 20))
    expected = padded_reference(q, k, v, causal=True)[0]
    torch.testing.assert_close(F.flash_attn_with_kvcache(q, k, v, causal=True), expected)
    pages, table = pages_of(torch.cat([k, v], -1), 4)
    out = F.flash_attn_with_kvcache(q, *pages.split(4, -1), block_table=table, causal=True)
    torch.testing.assert_close(out, expected)


def test_kvcache_has_no_gradients() -> None:
    q, k, v = inputs((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4))
    caches = torch.zeros(2, 1, 8, 2, 4, dtype=torch.float64)
    out = F.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0)
    assert not out.requires_grad
    assert not caches.requires_grad
    assert torch.equal(caches[1, :, :1], v)


def test_kvcache_reads_pages_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few queries, neither pages nor rows chosen by an index are copied."""
    monkeypatch.setattr(Stored, "dense", lambda *_: pytest.fail("the pages were gathered"))
    q, k = torch.randn(2, 1, 4, 8), torch.randn(6, 48, 2, 8)
    lengths = torch.tensor([20, 45])
    for arguments in (
        {"cache_batch_idx": torch.tensor([3, 1])},
        {"block_table": torch.tensor([[1, 2], [0, 5]])},
    ):
        cache = k[:, :32].contiguous() if "block_table" in arguments else k
        F.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True, **arguments)


def test_block_table_may_have_any_padding() -> None:
    q, k = torch.randn(2, 3, 2, 4), torch.randn(3, 16, 2, 4)
    tables = [torch.tensor([[2, padding], [1, 0]]) for padding in (0, -1, 10**6)]
    lengths = torch.tensor([9, 20])
    results = [F.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, block_table=t) for t in tables]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_kvcache_of_another_batch_raises() -> None:
    with pytest.raises(ValueError, match="k_cache: expected B = 2 rows as in q, got 3"):
        F.flash_attn_with_kvcache(torch.randn(2, 1, 2, 4), *torch.randn(2, 3, 8, 2, 4))


def test_pages_with_cache_batch_idx_raise() -> None:
    """flash-attn 2 raises too. The index would select pages instead of samples."""
    q, cache, table = (
        torch.randn(2, 1, 2, 4),
        torch.randn(4, 16, 2, 4),
        torch.tensor([[2, 1], [0, 3], [1, 2]]),
    )
    index = torch.tensor([2, 0])
    with pytest.raises(ValueError, match=r"cache_batch_idx: expected None .* write table\[cache_batch_idx\]"):
        F.flash_attn_with_kvcache(q, cache, cache, block_table=table, cache_batch_idx=index)
    with pytest.raises(ValueError, match="cache_batch_idx: expected None with a table of pages"):
        flash_attn_interface.flash_attn_with_kvcache(q, cache, cache, page_table=table, cache_batch_idx=index)
    assert F.flash_attn_with_kvcache(q, cache, cache, block_table=table[index]).shape == q.shape


@pytest.mark.parametrize("lengths_q", [(1, 1, 1), (2, 1, 5), (4, 4, 4)])
@pytest.mark.parametrize("name", OPTIONS)
def test_varlen_with_pages(name: str, lengths_q: tuple[int, ...]) -> None:
    lengths_k, options = (9, 20, 33), options_of(name, 3, HQ)
    rows = torch.randn(3, 48, HKV, 2 * D, dtype=torch.float64)
    pages, table = pages_of(rows, 16)
    q = torch.randn(sum(lengths_q), HQ, D, dtype=torch.float64)
    sizes = (cu(lengths_q), cu(lengths_k), max(lengths_q), max(lengths_k))
    out = F.flash_attn_varlen_func(q, *pages.split(D, -1), *sizes, **options, block_table=table)
    keys = torch.cat([x[:n] for x, n in zip(rows, lengths_k, strict=True)]).split(D, -1)
    torch.testing.assert_close(out, packed_reference(q, *keys, lengths_q, lengths_k, **options)[0])


# Padding and rotary embeddings


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).to(dtype)
    (x,) = inputs((3, 4, 2, 5))
    row, indices, cu_seqlens, longest, used = F.unpad_input(x, mask)
    assert torch.equal(row, x[mask.bool()])
    assert indices.tolist() == [1, 2, 4, 5, 6, 7, 11]
    assert cu_seqlens.tolist() == [0, 2, 6, 7]
    assert cu_seqlens.dtype is torch.int32
    assert longest == 4
    assert used.tolist() == [2, 4, 1]
    back = F.pad_input(row, indices, 3, 4)
    assert torch.equal(back, x * mask.bool()[..., None, None])
    (grad,) = torch.autograd.grad(back.square().sum(), x)
    assert torch.equal(grad, 2 * x * mask.bool()[..., None, None])
    assert torch.equal(F.index_first_axis(x.flatten(0, 1), indices), row)


def test_unused_tokens_are_packed_but_not_counted() -> None:
    mask, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 1]])
    x = torch.randn(2, 3, 4)
    row, indices, cu_seqlens, longest, used = F.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 3, 4, 5]
    assert torch.equal(row, x.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5]
    assert longest == 3
    assert used.tolist() == [1, 2]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, (2, 0, 7)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool, packed: bool, offsets: Any, inplace: bool) -> None:
    cos, sin = tables_of(20, 3)
    lengths = (4, 1, 6) if packed else (5, 5, 5)
    (leaf,) = inputs((sum(lengths), 2, 8))
    starts = [offsets] * 3 if isinstance(offsets, int) else offsets
    parts = zip(leaf.split(lengths), starts, strict=True)
    expected = torch.cat([rotation(x, cos, sin, n, interleaved) for x, n in parts])
    x = leaf * 1.0
    x, sizes = (x, {"cu_seqlens": cu(lengths), "max_seqlen": 6}) if packed else (x.unflatten(0, (3, 5)), {})
    first = offsets if isinstance(offsets, int) else torch.tensor(offsets)
    out = F.apply_rotary_emb(x, cos, sin, interleaved, inplace, first, **sizes)
    assert (out.data_ptr() == x.data_ptr()) is inplace
    torch.testing.assert_close(out.reshape(expected.shape), expected)
    dout = torch.randn_like(expected)
    actual = torch.autograd.grad(out.reshape(expected.shape), leaf, dout)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, leaf, dout))


# Signatures, of flash-attn 2.8

SIGNATURES = {
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_kvpacked_func": "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False block_table=None",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p=0.0 softmax_scale=None "
    "causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None "
    "causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 "
    "return_softmax_lse=False",
    "index_first_axis": "input indices",
    "pad_input": "hidden_states indices batch seqlen",
    "unpad_input": "hidden_states attention_mask unused_mask=None",
    "apply_rotary_emb": "x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None "
    "max_seqlen=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert signature(getattr(F, name)) == SIGNATURES[name]


# torch.compile, torch.export, vmap, fake tensors


def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Packs the two samples of length 9 as three sequences."""
    sizes = torch.tensor([0, 4, 9, 18], dtype=torch.int32)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    return F.flash_attn_varlen_func(*packed, sizes, sizes, 9, 9, causal=True, window_size=(3, -1))


def cached(
    table: list[list[int]] | None = None, index: list[int] | None = None, length: int | None = None
) -> Function:
    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (2, 32, 2, 8) if table is None else (4, 16, 2, 8)
        caches = [torch.zeros(shape) + 0 * q.sum() for _ in range(2)]
        angles = torch.arange(32.0)[:, None] * torch.tensor([1.0, 0.5])
        rows = {} if table is None else {"block_table": torch.tensor(table)}
        rows |= {} if index is None else {"cache_batch_idx": torch.tensor(index)}
        lengths = torch.tensor([3, 17]) if length is None else length
        out = F.flash_attn_with_kvcache(
            q[:, :3], *caches, k[:, :3], v[:, :3], angles.cos(), angles.sin(), lengths, causal=True, **rows
        )
        return torch.cat([x.flatten() for x in (out, *caches)])

    return decode


TRACED: dict[str, Function] = {
    "func": lambda q, k, v: F.flash_attn_func(q, k, v, causal=True, window_size=(5, 0), softcap=3.0),
    "alibi": lambda q, k, v: F.flash_attn_func(q, k, v, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "alibi-sample": lambda q, k, v: F.flash_attn_func(q, k, v, alibi_slopes=torch.ones(2, 4) / 4),
    "kvpacked": lambda q, k, v: F.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True),
    "probs": lambda q, k, v: F.flash_attn_func(q, k, v, return_attn_probs=True)[:2],
    "varlen": varlen,
    "rows": cached(),
    "int": cached(length=9),
    "pages": cached(table=[[3, 1], [0, 2]]),
    "index": cached(index=[1, 0]),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced(name: str) -> None:
    check_traced(TRACED[name], [torch.randn(2, 9, H, 8) for H in (4, 2, 2)])


def test_rotary_traced() -> None:
    cos, sin = tables_of(20, 3)
    offsets, sizes = torch.tensor([4, 1]), torch.tensor([0, 4, 9])
    check_traced(lambda x: F.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets), [torch.randn(2, 9, 2, 8)])
    check_traced(lambda x: F.apply_rotary_emb(x, cos, sin, cu_seqlens=sizes), [torch.randn(9, 2, 8)])


def test_varlen_compiled_with_its_lengths() -> None:
    """cu_seqlens are inputs of the graph, so their values are unknown while it is compiled."""
    q, k, v = (torch.randn(9, H, 8) for H in (4, 2, 2))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(cu_q: Tensor, cu_k: Tensor, causal: bool) -> Tensor:
        return F.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 5, causal=causal)

    for lengths in ((4, 5), (2, 7)):
        sizes = cu(lengths)
        expected = packed_reference(q, k, v, lengths, lengths, causal=True)[0]
        torch.testing.assert_close(compiled(sizes, sizes, True), expected.float(), rtol=0, atol=1e-5)
        other = packed_reference(q, k, v, lengths, lengths[::-1])[0]
        torch.testing.assert_close(
            compiled(sizes, cu(lengths[::-1]), False), other.float(), rtol=0, atol=1e-5
        )


# Mistakes


@pytest.mark.parametrize("length", [8, torch.tensor([3, 8])])
@pytest.mark.parametrize("paged", [False, True])
def test_a_full_cache_raises_before_it_is_written(paged: bool, length: int | Tensor) -> None:
    q, caches = torch.randn(2, 1, 2, 4), torch.zeros(2, 2, 8, 2, 4)
    table = {"block_table": torch.tensor([[0, 1], [3, 2]])} if paged else {}
    caches = caches.unflatten(2, (2, 4)).flatten(1, 2) if paged else caches
    with pytest.raises(ValueError, match="cache_seqlens: expected at most 7, as the cache has room for 8"):
        F.flash_attn_with_kvcache(q, *caches, q, q, cache_seqlens=length, **table)
    assert not caches.any()


def test_half_of_a_pair_raises() -> None:
    q, cos = torch.randn(1, 1, 2, 4), torch.ones(8, 2)
    cache = torch.zeros(1, 8, 2, 4)
    with pytest.raises(ValueError, match="k, v: expected both or neither"):
        F.flash_attn_with_kvcache(q, cache, cache, q, cache_seqlens=0)
    with pytest.raises(ValueError, match="rotary_cos, rotary_sin: expected both or neither"):
        F.flash_attn_with_kvcache(q, cache, cache, q, q, rotary_cos=cos, cache_seqlens=0)


def test_pages_and_no_queries() -> None:
    """Sequences without queries, and with pages: nothing to compute."""
    pages, none = torch.randn(2, 16, 2, 4), torch.zeros(3, dtype=torch.int32)
    sizes = (none, torch.tensor([0, 5, 9]), 0, 5)
    table = torch.tensor([[0], [1]])
    out = F.flash_attn_varlen_func(torch.randn(0, 2, 4), pages, pages, *sizes, block_table=table)
    assert out.shape == (0, 2, 4)
