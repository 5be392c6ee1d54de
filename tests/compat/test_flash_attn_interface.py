"""`regard.compat.flash_attn_interface` (flash-attn 3) against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.compat import flash_attn_interface as F
from support import HAVE_CORE
from support.flash import packed_reference, padded_reference, reference, rotation, signature
from support.tracing import check_traced

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 1.5, "causal": True},
    "scale": {"softmax_scale": 0.3},
    "chunk": {"attention_chunk": 3},
    "causal-chunk": {"attention_chunk": 4, "causal": True},
}


def expected_options(name: str) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    return options | {"chunk": options.pop("attention_chunk", 0)}


def check(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    torch.testing.assert_close(result, expected)
    dout = torch.randn_like(expected[0])
    actual = torch.autograd.grad(result[0], leaves, dout)
    torch.testing.assert_close(actual, torch.autograd.grad(expected[0], leaves, dout))


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def cu(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("name", OPTIONS)
def test_func(name: str) -> None:
    leaves = inputs((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6))
    result = F.flash_attn_func(*leaves, **OPTIONS[name], return_attn_probs=True)
    check(result, padded_reference(*leaves, **expected_options(name)), leaves)
    assert torch.equal(F.flash_attn_func(*leaves, **OPTIONS[name]), result[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_qkvpacked(name: str) -> None:
    (qkv,) = inputs((2, 7, 3, 4, 8))
    result = F.flash_attn_qkvpacked_func(qkv, **OPTIONS[name], return_attn_probs=True)
    check(result, padded_reference(*qkv.unbind(2), **expected_options(name)), [qkv])
    (qkv,) = inputs((2, 7, 8, 8))
    result = F.flash_attn_qkvpacked_func(qkv, **OPTIONS[name], num_heads_q=4, return_attn_probs=True)
    check(result, padded_reference(*qkv.split([4, 2, 2], 2), **expected_options(name)), [qkv])
    with pytest.raises(ValueError, match="num_heads_q: expected the number of query heads"):
        F.flash_attn_qkvpacked_func(qkv)


@pytest.mark.parametrize("lengths_k", [(3, 5, 1), (7, 2, 4)])
@pytest.mark.parametrize("name", OPTIONS)
def test_varlen(name: str, lengths_k: tuple[int, ...]) -> None:
    lengths_q = (3, 5, 1)
    leaves = inputs((9, 4, 8), (sum(lengths_k), 2, 8), (sum(lengths_k), 2, 8))
    sizes = (cu(lengths_q), cu(lengths_k), 5, max(lengths_k))
    result = F.flash_attn_varlen_func(*leaves, *sizes, **OPTIONS[name], return_attn_probs=True)
    check(result, packed_reference(*leaves, lengths_q, lengths_k, **expected_options(name)), leaves)


@pytest.mark.parametrize("name", OPTIONS)
def test_varlen_with_seqused(name: str) -> None:
    (q, k, v), used_q, used_k = inputs((10, 4, 8), (12, 2, 8), (12, 2, 8)), (2, 5), (4, 3)
    sizes = (cu((4, 6)), cu((7, 5)), 6, 7)
    used = {"seqused_q": torch.tensor(used_q), "seqused_k": torch.tensor(used_k)}
    out, lse = F.flash_attn_varlen_func(q, k, v, *sizes, **used, **OPTIONS[name], return_attn_probs=True)
    assert not out[[2, 3, 9]].any()
    assert lse[:, [2, 3, 9]].isneginf().all()
    real_q, real_k = [0, 1, 4, 5, 6, 7, 8], [0, 1, 2, 3, 7, 8, 9]
    expected = packed_reference(q[real_q], k[real_k], v[real_k], used_q, used_k, **expected_options(name))
    check((out[real_q], lse[:, real_q]), expected, [q, k, v])


@pytest.mark.parametrize("storage", ["rows", "pages", "index"])
@pytest.mark.parametrize("packed", ["no", "queries", "all"])
@pytest.mark.parametrize("name", OPTIONS)
def test_kvcache(name: str, packed: str, storage: str) -> None:
    """Sequences of different lengths, rotated from `rotary_seqlens` on, with packed or padded tokens."""
    lengths, starts = (4, 20), (1, 7)
    lengths_q = (2, 2) if packed == "no" else (3, 1)
    lengths_k = (3, 1) if packed == "all" else (2, 2)
    q, k, v = (torch.randn(n, H, 8, dtype=torch.float64) for n, H in ((4, 4), (4, 2), (4, 2)))
    rows = torch.randn(2, 2, 32, 2, 8, dtype=torch.float64)  # keys and values of two samples
    angles = torch.rand(40, 3, dtype=torch.float64)
    cos, sin, expected = angles.cos(), angles.sin(), []
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    for b, (queries, keys, values) in enumerate(parts):
        advance = "causal" in OPTIONS[name] or "window_size" in OPTIONS[name]
        turned = rotation(queries, cos, sin, starts[b], False, advance)
        end = torch.cat([rotation(keys, cos, sin, starts[b], False)[None], values[None]])
        full = torch.cat([rows[:, b, : lengths[b]], end], 1)
        expected.append(reference(turned, *full, **expected_options(name)))
    cache, options = rows.clone(), dict(OPTIONS[name])
    if storage == "pages":
        cache, options["page_table"] = torch.zeros(2, 5, 16, 2, 8).double(), torch.tensor([[4, 1], [0, 3]])
        cache[:, options["page_table"]] = rows.unflatten(2, (2, 16))
    if storage == "index":
        cache, options["cache_batch_idx"] = torch.zeros(2, 3, 32, 2, 8).double(), torch.tensor([2, 0])
        cache[:, [2, 0]] = rows
    options |= {"cu_seqlens_q": cu(lengths_q), "max_seqlen_q": 3} if packed != "no" else {}
    options |= {"cu_seqlens_k_new": cu(lengths_k)} if packed == "all" else {}
    q = q.unflatten(0, (2, 2)) if packed == "no" else q
    k, v = (k, v) if packed == "all" else (k.unflatten(0, (2, 2)), v.unflatten(0, (2, 2)))
    out, lse, *rest = F.flash_attn_with_kvcache(
        q, *cache, k, v, None, cos, sin, torch.tensor(lengths), rotary_seqlens=torch.tensor(starts),
        rotary_interleaved=False, return_softmax_lse=True, **options,
    )  # fmt: skip
    assert [x.numel() for x in rest] == [0, 0]  # the partial results of splits
    outs, lses = zip(*expected, strict=True)
    torch.testing.assert_close(out, torch.stack(outs) if packed == "no" else torch.cat(outs))
    torch.testing.assert_close(lse, torch.stack(lses) if packed == "no" else torch.cat(lses, 1))


def test_combine() -> None:
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 4, 8)
    parts = [F.flash_attn_func(q, x, x, return_attn_probs=True) for x in k.split(3, 1)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = F.flash_attn_combine(outs, lses.transpose(-1, -2), out_dtype=torch.float64)
    expected = F.flash_attn_func(q, k, k, return_attn_probs=True)
    torch.testing.assert_close(out, expected[0].double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.transpose(-1, -2), expected[1])
    target = torch.empty_like(q)
    assert F.flash_attn_combine(outs, lses.transpose(-1, -2), target)[0] is target


def test_what_is_refused() -> None:
    q = torch.randn(1, 2, 2, 8)
    with pytest.raises(NotImplementedError, match=r"qv: expected None, got .*LatentAttention"):
        F.flash_attn_func(q, q, q, qv=q)
    with pytest.raises(NotImplementedError, match="k_descale: expected None"):
        F.flash_attn_func(q, q, q, k_descale=q)


def test_nanochat() -> None:
    """The calls of a small language model: training, prefill of equal lengths, decode steps."""
    q, k, v = (torch.randn(1, 12, H, 8) for H in (4, 2, 2))
    whole = F.flash_attn_func(q, k, v, causal=True, window_size=(6, 0))
    caches = torch.zeros(2, 1, 16, 2, 8)
    outs, lengths = [], torch.zeros(1, dtype=torch.int32)
    for tokens in (slice(0, 7), *(slice(i, i + 1) for i in range(7, 12))):
        new = {"k": k[:, tokens], "v": v[:, tokens]}
        outs.append(
            F.flash_attn_with_kvcache(
                q[:, tokens], *caches, **new, cache_seqlens=lengths, causal=True, window_size=(6, 0)
            )
        )
        lengths += tokens.stop - tokens.start
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=0, atol=1e-5)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = regard.attention(*heads_first, mask=regard.masks.Window(6, 0)).transpose(1, 2)
    assert torch.equal(whole, expected)


SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None "
    "v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None "
    "deterministic=False sm_margin=0 return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv softmax_scale=None causal=False q_descale=None k_descale=None "
    "v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False "
    "num_heads_q=None sm_margin=0 return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None "
    "seqused_k=None softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None "
    "window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False "
    "sm_margin=0 return_attn_probs=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None "
    "cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None q_descale=None k_descale=None "
    "v_descale=None softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    "rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
    "return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert signature(getattr(F, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", ["causal", "causal-chunk"])
def test_traced(name: str) -> None:
    inputs = [torch.randn(2, 9, H, 8) for H in (4, 2, 2)]
    check_traced(lambda q, k, v: F.flash_attn_func(q, k, v, **OPTIONS[name]), inputs)
