"""Tests the modules with the names of papers and textbooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard import masks as M
from support import HAVE_CORE, assert_close
from support.modules import randomized
from support.tracing import check_traced

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


def test_named_constructors() -> None:
    assert regard.nn.SelfAttention(24, heads=4).kv_heads == 4
    assert regard.nn.SelfAttention(24).heads == 1
    assert regard.nn.MultiQueryAttention(24, 4).kv_heads == 1
    assert regard.nn.GroupedQueryAttention(24, 4, 2, bias=False).qkv.weight.shape == (48, 24)
    assert regard.nn.CrossAttention(24, heads=4).kv_model == 24
    assert regard.nn.CausalSelfAttention(24, heads=3).mask == M.Causal()


def test_self_attention_of_one_head_without_output_projection() -> None:
    layer = randomized(regard.nn.SelfAttention(16, d_k=8, d_v=6, out=False))
    x = torch.randn(2, 5, 16)
    q, k, v = layer.qkv(x).split((8, 8, 6), -1)
    assert_close(layer(x), (q @ k.mT / 8**0.5).softmax(-1) @ v)


@pytest.mark.parametrize("name", ["SelfAttention", "CausalSelfAttention", "CrossAttention"])
def test_a_second_number_by_position_raises(name: str) -> None:
    make: Any = getattr(regard.nn, name)
    for sizes in ((8,), (8, 6)):
        with pytest.raises(TypeError) as caught:
            make(16, *sizes)
        assert f"{name}(16, heads=8) for 8 heads, or {name}(16, d_k=8)" in str(caught.value)


NAMED = ("SelfAttention", "CausalSelfAttention", "CrossAttention", "MultiQueryAttention",
         "GroupedQueryAttention", "EncoderBlock", "DecoderBlock", "Attention", "LatentAttention")  # fmt: skip


@pytest.mark.parametrize("name", ["n_heads", "num_heads", "n_head", "h"])
@pytest.mark.parametrize("module", NAMED)
def test_other_names_of_heads_raise(module: str, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: write heads=$"):
        getattr(regard.nn, module)(16, **{name: 8})


@pytest.mark.parametrize("module", NAMED[:-1])
def test_an_unknown_keyword_raises(module: str) -> None:
    sizes = {"heads": 4} | ({"kv_heads": 2} if module == "GroupedQueryAttention" else {})
    with pytest.raises(TypeError, match=r"Attention\(\) got an unexpected keyword argument 'colour'"):
        getattr(regard.nn, module)(16, **sizes, colour="red")


def test_scaled_dot_product_attention() -> None:
    q, k, v = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 11, 5), torch.randn(2, 3, 11, 4)
    layer = regard.nn.ScaledDotProductAttention(scale=0.7, dropout=0.5).eval()
    mask = torch.rand(2, 1, 7, 11) > 0.4
    out, w = layer(q, k, v, mask)
    expected = (0.7 * q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()
    assert_close(w, expected)
    assert_close(out, expected @ v)
    out, w = layer.train()(q, k, v, mask)
    assert_close(w, expected)  # before dropout
    assert not torch.allclose(out, expected @ v)


def test_a_number_of_scaled_dot_product_attention_by_position_raises() -> None:
    with pytest.raises(TypeError, match=r"write dropout=0\.1 .* or scale=1 / 0\.1 for a temperature"):
        regard.nn.ScaledDotProductAttention(0.1)


def test_missing_names_say_what_to_write() -> None:
    with pytest.raises(AttributeError, match=r"PostNorm\(d_model, Attention\(d_model, heads\)\)"):
        _ = regard.nn.MultiHeadAttention  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no attribute 'Nothing'$"):
        _ = regard.nn.Nothing  # type: ignore[attr-defined]
    assert not hasattr(regard.nn, "MultiHeadAttention")


@pytest.mark.parametrize("mask", [None, M.Causal()], ids=repr)
def test_scaled_dot_product_attention_is_traced(mask: M.Mask | None) -> None:
    torch._dynamo.reset()
    layer = regard.nn.ScaledDotProductAttention()
    check_traced(lambda q, k, v: layer(q, k, v, mask), [torch.randn(2, 3, 5, 8) for _ in range(3)])
