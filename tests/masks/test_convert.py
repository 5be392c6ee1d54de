"""Converters, checked against what PyTorch computes with the other library's form of the mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from regard import masks as M
from support.strategies import Case, mask_strategy

B, H, Lq, Lk, D = 2, 3, 5, 7, 4
VARIED = [
    M.Causal(),
    M.Lengths([3, 7]) & M.Causal(),
    M.PerHead([M.Causal(), M.Window(1, 1), M.Prefix(2)]),
    M.Documents([0, 0, 1, 1, 1, 2, 2]) | M.Global([1]),
    M.PerHead([M.Causal(), M.Lengths([3, 7]), M.Dilated(2)]) | M.Prefix(1),
]
varied = pytest.mark.parametrize("mask", VARIED, ids=[repr(m) for m in VARIED])


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, Lq, D), torch.randn(B, H, Lk, D), torch.randn(B, H, Lk, D)


def textbook(q: Tensor, k: Tensor, v: Tensor, given: M.Arguments) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v over the keys the mask allows."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if given.bias is not None:
        scores = scores + given.bias
    if given.mask is not None:
        scores = scores.masked_fill(~given.mask.to_dense(q.shape[-2], k.shape[-2], given.offset), -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


# SDPA


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "per head", "float"])
def test_from_sdpa(kind: str) -> None:
    q, k, v = qkv()
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(B, 1, Lq, Lk) > 0.4},
        "per head": {"attn_mask": torch.rand(H, Lq, Lk) > 0.4},
        "float": {"attn_mask": torch.randn(Lq, Lk)},
    }[kind]
    torch.testing.assert_close(textbook(q, k, v, M.from_sdpa(**options)), sdpa(q, k, v, **options))


@varied
def test_to_sdpa(mask: M.Mask) -> None:
    q, k, v = qkv()
    there = M.to_sdpa(mask, Lq, Lk, heads=H)
    torch.testing.assert_close(sdpa(q, k, v, there), textbook(q, k, v, M.Arguments(mask)))
    back = M.from_sdpa(there).mask
    assert back is not None
    assert torch.equal(back.to_dense(Lq, Lk), mask.to_dense(Lq, Lk))


def test_from_sdpa_refuses_both() -> None:
    with pytest.raises(ValueError, match="attn_mask and is_causal: expected at most one of them, got both"):
        M.from_sdpa(torch.ones(2, 2).bool(), is_causal=True)


# nn.MultiheadAttention


def mha_module() -> nn.MultiheadAttention:
    """Identity projections, so that it is attention on the given vectors."""
    module = nn.MultiheadAttention(H * D, H, batch_first=True, bias=False)
    eye = torch.eye(H * D)
    with torch.no_grad():
        module.in_proj_weight.copy_(eye.repeat(3, 1))
        module.out_proj.weight.copy_(eye)
    return module


def run_mha(q: Tensor, k: Tensor, v: Tensor, **options: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    out, _ = mha_module()(q, k, v, need_weights=False, **options)
    return out.unflatten(2, (H, D)).transpose(1, 2).detach()


@pytest.mark.parametrize("float_attn", [False, True])
@pytest.mark.parametrize("padding", ["none", "right", "left", "both", "holes"])
@pytest.mark.parametrize("shape", [(Lq, Lk), (B * H, Lq, Lk)])
def test_from_mha(float_attn: bool, padding: str, shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    attn = torch.rand(shape) > 0.7
    attn[..., 2] = False  # so that every row sees something
    attn = torch.randn(shape).masked_fill(attn, -torch.inf) if float_attn else attn
    ignored = {
        "none": None,
        "right": [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1]],
        "left": [[1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]],
        "both": [[1, 0, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 0]],
        "holes": [[1, 0, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 1, 0]],
    }[padding]
    keys = None if ignored is None else torch.tensor(ignored) != 0
    there = keys.float().masked_fill(keys, -torch.inf) if keys is not None and float_attn else keys
    expected = run_mha(q, k, v, attn_mask=attn, key_padding_mask=there)
    torch.testing.assert_close(textbook(q, k, v, M.from_mha(attn, keys, heads=H)), expected)
    torch.testing.assert_close(textbook(q, k, v, M.from_mha(attn, there, heads=H)), expected)


@varied
def test_to_mha(mask: M.Mask) -> None:
    q, k, v = qkv()
    mask = mask | M.Prefix(1)
    there = M.to_mha(mask, B, H, Lq, Lk)
    torch.testing.assert_close(run_mha(q, k, v, attn_mask=there), textbook(q, k, v, M.Arguments(mask)))
    back = M.from_mha(there, heads=H).mask
    assert back is not None
    assert torch.equal(*torch.broadcast_tensors(back.to_dense(Lq, Lk), mask.to_dense(Lq, Lk)))


def test_mha_causal_and_faults() -> None:
    assert M.from_mha(is_causal=True) == (M.Causal(), None, 0)
    assert M.from_mha() == (None, None, None)
    with pytest.raises(ValueError, match=r"\(B \* heads, Lq, Lk\) with `heads`, got bool .* heads = None"):
        M.from_mha(torch.ones(6, 2, 2).bool())
    with pytest.raises(
        TypeError, match=r"key_padding_mask: expected bool \(True = may not attend\) or float"
    ):
        M.from_mha(key_padding_mask=torch.ones(2, 2, dtype=torch.int64))


# Hugging Face


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, 1, 1], [1, 1, 1]], M.Lengths([3, 3])),
        ([[1, 1, 0], [1, 0, 0]], M.Lengths([2, 1])),
        ([[0, 1, 1], [0, 0, 1]], ~M.Lengths([1, 2])),
        ([[0, 1, 1], [0, 1, 0]], M.Lengths([3, 2]) & ~M.Lengths([1, 1])),
        ([[0, 0, 0], [1, 1, 0]], M.Lengths([0, 2])),
        ([[1, 0, 1], [1, 1, 1]], M.Dense(torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()[:, None, None])),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_hf_2d(rows: list[list[int]], expected: M.Mask, dtype: torch.dtype) -> None:
    there = torch.tensor(rows).to(dtype)
    mask = M.from_hf_2d(there)
    assert mask == expected
    assert M.to_hf_2d(mask, 3).tolist() == rows


@given(
    st.integers(0, 4).flatmap(lambda L: st.lists(st.lists(st.booleans(), min_size=L, max_size=L), min_size=1))
)
def test_padding_keeps_every_pattern(rows: list[list[bool]]) -> None:
    keep = torch.tensor(rows, dtype=torch.bool)
    dense = M.padding(keep).to_dense(1, keep.shape[-1])
    assert torch.equal(dense.expand(len(rows), 1, 1, -1)[:, 0, 0], keep)


def test_hf_2d_faults() -> None:
    with pytest.raises(ValueError, match=r"attention_mask: expected 0 \(padding\) or 1 \(real token\)"):
        M.from_hf_2d(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"shape \(B, L\), got int64 tensor of shape \(2,\)"):
        M.from_hf_2d(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"not depend on the query .*, got Causal\(\) & Lengths\(3\)"):
        M.to_hf_2d(M.Causal() & M.Lengths(3), 5)


@varied
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_hf_4d(mask: M.Mask, dtype: torch.dtype | None) -> None:
    there = M.to_hf_4d(mask, Lq, Lk, heads=H, dtype=dtype)
    assert there.ndim == 4
    assert there.dtype == (dtype or torch.bool)
    back = M.from_hf_4d(there)
    assert back.bias is None
    assert back.mask is not None
    assert torch.equal(*torch.broadcast_tensors(back.mask.to_dense(Lq, Lk), mask.to_dense(Lq, Lk)))


def test_hf_4d_additive() -> None:
    lowest = torch.finfo(torch.float32).min
    doubly = torch.tensor([0.0, lowest, 2 * lowest, -torch.inf]).reshape(1, 1, 1, 4)
    mask = M.from_hf_4d(doubly).mask
    assert mask is not None
    assert mask.to_dense(1, 4).flatten().tolist() == [True, False, False, False]
    bias = torch.randn(1, 1, 2, 3)
    assert M.from_hf_4d(bias).bias is bias
    with pytest.raises(ValueError, match=r"\(B, 1 or Hq, Lq, Lk\)"):
        M.from_hf_4d(bias[0])


# cu_seqlens


def test_cu_seqlens_of_packed_tokens() -> None:
    borders = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    mask = M.from_cu_seqlens(borders)
    assert mask == M.Documents([0, 0, 1, 1, 1, 2])
    q_borders, k_borders = M.to_cu_seqlens(mask)
    assert q_borders.dtype == torch.int32
    assert torch.equal(q_borders, borders)
    assert torch.equal(k_borders, borders)
    q = torch.randn(6, D)
    packed = textbook(q, q, q, M.Arguments(mask & M.Causal()))
    alone = [sdpa(part, part, part, is_causal=True) for part in q.split([2, 3, 1])]
    torch.testing.assert_close(packed, torch.cat(alone))


def test_cu_seqlens_of_queries_and_keys() -> None:
    q_borders, k_borders = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 4, 6])
    mask = M.from_cu_seqlens(q_borders, k_borders)
    there = M.to_cu_seqlens(mask)
    assert [borders.tolist() for borders in there] == [[0, 2, 2, 5], [0, 1, 4, 6]]
    assert [b.tolist() for b in M.to_cu_seqlens(M.Documents([5, 5, 3], [5, 3, 3]))] == [[0, 2, 3], [0, 1, 3]]


def test_cu_seqlens_faults() -> None:
    with pytest.raises(ValueError, match="q_ids: expected contiguous documents, got an id that comes back"):
        M.to_cu_seqlens(M.Documents([0, 1, 0]))
    with pytest.raises(ValueError, match="same order of documents"):
        M.to_cu_seqlens(M.Documents([5, 3], [3, 5]))
    with pytest.raises(ValueError, match=r"q_ids: expected one row of packed sequences, got shape \(2, 2\)"):
        M.to_cu_seqlens(M.Documents([[0, 1], [0, 1]]))
    with pytest.raises(TypeError, match="mask: expected Documents, got Causal"):
        M.to_cu_seqlens(M.Causal())  # type: ignore[arg-type]
    for wrong in ([1, 2], [0, 3, 2]):
        with pytest.raises(ValueError, match="cu_seqlens_q: expected to start with 0 and not decrease"):
            M.from_cu_seqlens(torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"\(N \+ 1,\)"):
        M.from_cu_seqlens(torch.tensor([0.0, 2.0]))
    with pytest.raises(ValueError, match="cu_seqlens_k: expected the shape of cu_seqlens_q"):
        M.from_cu_seqlens(torch.tensor([0, 2]), torch.tensor([0, 2, 4]))


# FlexAttention


@given(mask_strategy())
@settings(max_examples=50)
def test_flex_mask_mod_means_the_same(case: Case) -> None:
    mod = M.to_flex_mask_mod(case.mask, case.Lq, case.Lk, case.offset, batch=case.batch)
    dense = create_mask(mod, case.B, case.heads, case.Lq, case.Lk, device="cpu")
    assert torch.equal(dense, case.dense())


@given(mask_strategy(batches=((2,),), depth=1))
def test_flex_round_trip(case: Case) -> None:
    block_mask = M.to_flex(case.mask, case.Lq, case.Lk, case.offset, batch=2, heads=case.heads, block=4)
    back = M.from_flex(block_mask).to_dense(case.Lq, case.Lk)
    assert torch.equal(back.expand(2, case.heads, case.Lq, case.Lk), case.dense())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@varied
def test_flex_attention_agrees(mask: M.Mask) -> None:
    q, k, v = qkv()
    block_mask = M.to_flex(mask, Lq, Lk, batch=B, heads=H)
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=block_mask), textbook(q, k, v, M.Arguments(mask))
    )


def test_from_flex_finds_blocks() -> None:
    numbers, indices = (
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
    )
    plain = BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=4, seq_lengths=(7, 8))
    table = torch.tensor([[False, True], [True, True]])
    assert M.from_flex(plain) == M.Blocks(table, 4)
    whole = create_block_mask(lambda b, h, q, k: k // 4 != q // 4, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=4)
    assert M.from_flex(whole) == M.Blocks(~torch.eye(2).bool(), 4)
    causal = create_block_mask(lambda b, h, q, k: k <= q, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=(4, 8))
    assert M.from_flex(causal) == M.Dense(torch.ones(8, 8).tril().bool())


def test_to_flex_needs_to_know_the_batch() -> None:
    with pytest.raises(ValueError, match="broadcastable to batch"):
        M.to_flex(M.Lengths([1, 2]), 3, 3)
    with pytest.raises(ValueError, match="batch: expected B with an offset for each sample"):
        M.to_flex(M.Causal(), 3, 3, torch.tensor([0, 1]))


def test_lists_are_taken_and_other_things_named() -> None:
    assert M.from_sdpa([[True, False]]).mask == M.Dense(torch.tensor([[True, False]]))
    assert M.from_hf_2d([[1, 1, 0]]) == M.from_hf_2d(torch.tensor([[1, 1, 0]]))
    assert M.from_cu_seqlens([0, 4, 7]) == M.from_cu_seqlens(torch.tensor([0, 4, 7]))
    with pytest.raises(TypeError, match="attention_mask must be a tensor or a list"):
        M.from_hf_2d("padding")
    with pytest.raises(TypeError, match="cu_seqlens_q must be a tensor or a list"):
        M.from_cu_seqlens(object())
