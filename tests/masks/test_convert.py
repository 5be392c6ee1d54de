"""Tests of the mask converters: attention with a converted mask matches PyTorch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
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


def textbook(q: Tensor, k: Tensor, v: Tensor, arguments: M.Arguments) -> Tensor:
    """Computes softmax(q k^T / sqrt(D) + bias) v over the keys that the mask allows."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if arguments.bias is not None:
        scores = scores + arguments.bias
    if arguments.mask is not None:
        scores = scores.masked_fill(
            ~arguments.mask.to_dense(q.shape[-2], k.shape[-2], arguments.offset), -torch.inf
        )
    return scores.softmax(-1).nan_to_num() @ v


# SDPA


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "per head", "float", "keys", "float keys"])
def test_from_sdpa(kind: str) -> None:
    q, k, v = qkv()
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(B, 1, Lq, Lk) > 0.4},
        "per head": {"attn_mask": torch.rand(H, Lq, Lk) > 0.4},
        "float": {"attn_mask": torch.randn(Lq, Lk)},
        "keys": {"attn_mask": torch.tensor([True, False] * 3 + [True])},
        "float keys": {"attn_mask": torch.randn(Lk)},
    }[kind]
    arguments = M.from_sdpa(**options)
    if "keys" in kind:  # SDPA does not take (Lk,)
        options = {"attn_mask": options["attn_mask"].expand(Lq, Lk)}
    torch.testing.assert_close(textbook(q, k, v, arguments), sdpa(q, k, v, **options))
    if kind != "per head":
        torch.testing.assert_close(regard.attention(q, k, v, **arguments._asdict()), sdpa(q, k, v, **options))


@varied
def test_to_sdpa(mask: M.Mask) -> None:
    q, k, v = qkv()
    sdpa_mask = M.to_sdpa(mask, Lq, Lk, heads=H)
    torch.testing.assert_close(sdpa(q, k, v, sdpa_mask), textbook(q, k, v, M.Arguments(mask)))
    restored = M.from_sdpa(sdpa_mask).mask
    assert restored is not None
    assert torch.equal(restored.to_dense(Lq, Lk), mask.to_dense(Lq, Lk))


def test_from_sdpa_rejects_mask_with_is_causal() -> None:
    with pytest.raises(ValueError, match="attn_mask and is_causal: expected at most one of them, got both"):
        M.from_sdpa(torch.ones(2, 2).bool(), is_causal=True)


# nn.MultiheadAttention


def mha_module() -> nn.MultiheadAttention:
    """Returns a module with identity projections: it computes attention on its raw inputs."""
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
    attn[..., 2] = False  # no fully masked rows
    attn = torch.randn(shape).masked_fill(attn, -torch.inf) if float_attn else attn
    ignored = {
        "none": None,
        "right": [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1]],
        "left": [[1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]],
        "both": [[1, 0, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 0]],
        "holes": [[1, 0, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 1, 0]],
    }[padding]
    ignored_keys = None if ignored is None else torch.tensor(ignored) != 0
    padding_mask = (
        ignored_keys.float().masked_fill(ignored_keys, -torch.inf)
        if ignored_keys is not None and float_attn
        else ignored_keys
    )
    expected = run_mha(q, k, v, attn_mask=attn, key_padding_mask=padding_mask)
    torch.testing.assert_close(textbook(q, k, v, M.from_mha(attn, ignored_keys, heads=H)), expected)
    torch.testing.assert_close(textbook(q, k, v, M.from_mha(attn, padding_mask, heads=H)), expected)


@varied
def test_to_mha(mask: M.Mask) -> None:
    q, k, v = qkv()
    mask = mask | M.Prefix(1)
    mha_mask = M.to_mha(mask, B, H, Lq, Lk)
    torch.testing.assert_close(run_mha(q, k, v, attn_mask=mha_mask), textbook(q, k, v, M.Arguments(mask)))
    restored = M.from_mha(mha_mask, heads=H).mask
    assert restored is not None
    assert torch.equal(*torch.broadcast_tensors(restored.to_dense(Lq, Lk), mask.to_dense(Lq, Lk)))


def test_mha_causal_and_errors() -> None:
    assert M.from_mha(is_causal=True) == (M.Causal(), None, 0)
    assert M.from_mha() == (None, None, None)
    with pytest.raises(ValueError, match=r"\(B \* heads, Lq, Lk\) with `heads`, got bool .* heads = None"):
        M.from_mha(torch.ones(6, 2, 2).bool())
    with pytest.raises(
        TypeError, match=r"key_padding_mask: expected bool \(True = may not attend\) or float"
    ):
        M.from_mha(key_padding_mask=torch.ones(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_mha_rejects_floats_of_zeros_and_ones(name: str) -> None:
    for zeros_and_ones in (torch.ones(4, 4).tril(), torch.ones(4, 4), torch.eye(4).half()):
        with pytest.raises(ValueError, match=rf"{name}: .* zeros and ones.* {name}.bool\(\).* {name} == 0"):
            M.from_mha(**{name: zeros_and_ones})
    learned = torch.ones(4, 4, requires_grad=True)
    for bias in (torch.zeros(4, 4), 2 * torch.eye(4), torch.ones(4, 4).triu().log(), learned):
        assert M.from_mha(**{name: bias}).bias is not None


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
    attention_mask = torch.tensor(rows).to(dtype)
    mask = M.from_hf_2d(attention_mask)
    assert mask == expected
    assert M.to_hf_2d(mask, 3).tolist() == rows


@given(
    st.integers(0, 4).flatmap(lambda L: st.lists(st.lists(st.booleans(), min_size=L, max_size=L), min_size=1))
)
def test_padding_represents_every_pattern(rows: list[list[bool]]) -> None:
    keep = torch.tensor(rows, dtype=torch.bool)
    dense = M.padding(keep).to_dense(1, keep.shape[-1])
    assert torch.equal(dense.expand(len(rows), 1, 1, -1)[:, 0, 0], keep)


def test_hf_2d_errors() -> None:
    with pytest.raises(ValueError, match=r"attention_mask: expected 0 \(padding\) or 1 \(real token\)"):
        M.from_hf_2d(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"shape \(B, L\), got int64 tensor of shape \(2,\)"):
        M.from_hf_2d(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"not depend on the query .*, got Causal\(\) & Lengths\(3\)"):
        M.to_hf_2d(M.Causal() & M.Lengths(3), 5)


@varied
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_hf_4d(mask: M.Mask, dtype: torch.dtype | None) -> None:
    attention_mask = M.to_hf_4d(mask, Lq, Lk, heads=H, dtype=dtype)
    assert attention_mask.ndim == 4
    assert attention_mask.dtype == (dtype or torch.bool)
    restored = M.from_hf_4d(attention_mask)
    assert restored.bias is None
    assert restored.mask is not None
    assert torch.equal(*torch.broadcast_tensors(restored.mask.to_dense(Lq, Lk), mask.to_dense(Lq, Lk)))


def test_hf_4d_additive() -> None:
    lowest = torch.finfo(torch.float32).min
    additive = torch.tensor([0.0, lowest, 2 * lowest, -torch.inf]).reshape(1, 1, 1, 4)
    mask = M.from_hf_4d(additive).mask
    assert mask is not None
    assert mask.to_dense(1, 4).flatten().tolist() == [True, False, False, False]
    bias = torch.randn(1, 1, 2, 3)
    assert M.from_hf_4d(bias).bias is bias
    with pytest.raises(ValueError, match=r"\(B, 1 or Hq, Lq, Lk\)"):
        M.from_hf_4d(bias[0])


# cu_seqlens


def test_cu_seqlens_of_packed_tokens() -> None:
    cu_seqlens = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    mask = M.from_cu_seqlens(cu_seqlens)
    assert mask == M.Documents([0, 0, 1, 1, 1, 2])
    cu_seqlens_q, cu_seqlens_k = M.to_cu_seqlens(mask)
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens)
    assert torch.equal(cu_seqlens_k, cu_seqlens)
    q = torch.randn(6, D)
    packed = textbook(q, q, q, M.Arguments(mask & M.Causal()))
    alone = [sdpa(sequence, sequence, sequence, is_causal=True) for sequence in q.split([2, 3, 1])]
    torch.testing.assert_close(packed, torch.cat(alone))


def test_cu_seqlens_of_queries_and_keys() -> None:
    cu_seqlens_q, cu_seqlens_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 4, 6])
    mask = M.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    converted = M.to_cu_seqlens(mask)
    assert [cu_seqlens.tolist() for cu_seqlens in converted] == [[0, 2, 2, 5], [0, 1, 4, 6]]
    assert [cu_seqlens.tolist() for cu_seqlens in M.to_cu_seqlens(M.Documents([5, 5, 3], [5, 3, 3]))] == [
        [0, 2, 3],
        [0, 1, 3],
    ]


def test_cu_seqlens_errors() -> None:
    with pytest.raises(ValueError, match="q_ids: expected contiguous documents, got an id that comes back"):
        M.to_cu_seqlens(M.Documents([0, 1, 0]))
    with pytest.raises(ValueError, match="same order of documents"):
        M.to_cu_seqlens(M.Documents([5, 3], [3, 5]))
    with pytest.raises(ValueError, match=r"q_ids: expected one row of packed sequences, got shape \(2, 2\)"):
        M.to_cu_seqlens(M.Documents([[0, 1], [0, 1]]))
    with pytest.raises(TypeError, match="mask: expected Documents, got Causal"):
        M.to_cu_seqlens(M.Causal())  # type: ignore[arg-type]
    for cu_seqlens in ([1, 2], [0, 3, 2]):
        with pytest.raises(ValueError, match="cu_seqlens_q: expected to start with 0 and not decrease"):
            M.from_cu_seqlens(torch.tensor(cu_seqlens))
    with pytest.raises(ValueError, match=r"\(N \+ 1,\)"):
        M.from_cu_seqlens(torch.tensor([0.0, 2.0]))
    with pytest.raises(ValueError, match="cu_seqlens_k: expected the shape of cu_seqlens_q"):
        M.from_cu_seqlens(torch.tensor([0, 2]), torch.tensor([0, 2, 4]))


# FlexAttention


@given(mask_strategy())
@settings(max_examples=50)
def test_flex_mask_mod_matches_dense(case: Case) -> None:
    mod = M.to_flex_mask_mod(case.mask, case.Lq, case.Lk, case.offset, batch=case.batch)
    dense = create_mask(mod, case.B, case.heads, case.Lq, case.Lk, device="cpu")
    assert torch.equal(dense, case.dense())


@given(mask_strategy(batches=((2,),), depth=1))
def test_flex_round_trip(case: Case) -> None:
    block_mask = M.to_flex(case.mask, case.Lq, case.Lk, case.offset, batch=2, heads=case.heads, block=4)
    restored = M.from_flex(block_mask).to_dense(case.Lq, case.Lk)
    assert torch.equal(restored.expand(2, case.heads, case.Lq, case.Lk), case.dense())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@varied
def test_flex_attention_agrees(mask: M.Mask) -> None:
    q, k, v = qkv()
    block_mask = M.to_flex(mask, Lq, Lk, batch=B, heads=H)
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=block_mask), textbook(q, k, v, M.Arguments(mask))
    )


def test_from_flex_finds_blocks() -> None:
    counts, indices = (
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
    )
    without_mask_mod = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4, seq_lengths=(7, 8))
    table = torch.tensor([[False, True], [True, True]])
    assert M.from_flex(without_mask_mod) == M.Blocks(table, 4)
    full_blocks = create_block_mask(
        lambda b, h, q, k: k // 4 != q // 4, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=4
    )
    assert M.from_flex(full_blocks) == M.Blocks(~torch.eye(2).bool(), 4)
    causal = create_block_mask(lambda b, h, q, k: k <= q, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=(4, 8))
    triangles = torch.stack([torch.ones(4, 8).tril(n) for n in (-4, 8, 0, 4)]).bool()
    assert M.from_flex(causal) == M.BlockPatterns([[2], [3]], triangles)


def test_from_flex_keeps_the_heads() -> None:
    block_mask = create_block_mask(lambda b, h, q, k: k <= q + h, 1, H, Lq, Lk, device="cpu")
    mask = M.from_flex(block_mask)
    expected = torch.stack([torch.ones(Lq, Lk).tril(h).bool() for h in range(H)])[None]
    assert torch.equal(mask.to_dense(Lq, Lk), expected)
    mask.check((B,), H, Lq, Lk)


def test_to_flex_requires_the_batch_size() -> None:
    with pytest.raises(ValueError, match="broadcastable to batch"):
        M.to_flex(M.Lengths([1, 2]), 3, 3)
    with pytest.raises(ValueError, match="batch: expected B with an offset for each sample"):
        M.to_flex(M.Causal(), 3, 3, torch.tensor([0, 1]))


def test_converters_accept_lists_and_name_wrong_arguments() -> None:
    assert M.from_sdpa([[True, False]]).mask == M.Dense(torch.tensor([[True, False]]))
    assert M.from_hf_2d([[1, 1, 0]]) == M.from_hf_2d(torch.tensor([[1, 1, 0]]))
    assert M.from_cu_seqlens([0, 4, 7]) == M.from_cu_seqlens(torch.tensor([0, 4, 7]))
    with pytest.raises(TypeError, match="attention_mask: expected a tensor or a list"):
        M.from_hf_2d("padding")
    with pytest.raises(TypeError, match="cu_seqlens_q: expected a tensor or a list"):
        M.from_cu_seqlens(object())
