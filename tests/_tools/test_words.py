"""Tests of keywords of other libraries: the error says what to write, and what it says is right."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import regard
from regard import cache, masks, nn, packing, scores
from regard._tools.words import WORDS, unknown_keyword
from regard.compat import flash_attn

B, H, HKV, LQ, LK, D = 2, 4, 2, 5, 7, 3
Q, K, V = torch.randn(B, H, LQ, D), torch.randn(B, HKV, LK, D), torch.randn(B, HKV, LK, D)
X = torch.randn(B, LQ, 8)


def packed(**options: Any) -> Any:
    return packing.varlen_attention(*(x[0].transpose(0, 1) for x in (Q, K, V)), [0, LQ], [0, LK], **options)


def latent(**options: Any) -> Any:
    return nn.LatentAttention(8, 2, rank=4, nope_dim=3, rope_dim=2, **options)


# Each call is complete, so that a keyword is its only fault.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (regard.attention, lambda **o: regard.attention(Q, K, V, **o)),
    "weights": (regard.weights, lambda **o: regard.weights(Q, K, V, **o)),
    "plan": (regard.plan, lambda **o: regard.plan(Q, K, V, **o)),
    "evidence": (regard.evidence, lambda **o: regard.evidence(Q, K, V, regard.Entropy(), **o)),
    "linear_attention": (regard.linear_attention, lambda **o: regard.linear_attention(Q, Q, Q, **o)),
    "varlen_attention": (packing.varlen_attention, packed),
    "KVCache": (cache.KVCache.attend, lambda **o: cache.KVCache(B, HKV, D).attend(Q, K, V, **o)),
    "PagedCache": (
        cache.PagedCache.attend,
        lambda **o: cache.PagedCache(4, HKV, D).attend(Q, K, V, **o),
    ),
    "LatentCache": (
        cache.LatentCache.attend,
        lambda **o: cache.LatentCache(B, 2, 1).attend(Q, torch.randn(B, LK, D), scale=1.0, **o),
    ),
    "LinearCache": (cache.LinearCache.attend, lambda **o: cache.LinearCache(B, H, D).attend(Q, Q, Q, **o)),
    "Attention": (nn.Attention.__init__, lambda **o: nn.Attention(8, 2, **o)),
    "Attention.forward": (nn.Attention.forward, lambda **o: nn.Attention(8, 2)(X, **o)),
    "LatentAttention": (nn.LatentAttention.__init__, latent),
    "LatentAttention.forward": (nn.LatentAttention.forward, lambda **o: latent()(X, **o)),
}
EVERY_WORD = sorted({word for words in WORDS.values() for word in words})


@pytest.mark.parametrize("name", CALLS)
def test_every_word_is_answered(name: str) -> None:
    """The answer names the keyword, and every option in it is one of the function."""
    function, call = CALLS[name]
    options = inspect.signature(function).parameters
    for word in [*EVERY_WORD, "no_such_option"]:
        if word in options:
            continue
        with pytest.raises(TypeError) as caught:
            call(**{word: None})
        message = str(caught.value)
        if message.startswith(f"{word}: "):
            assert set(re.findall(r"(\w+)=", message)) <= set(options), message
        else:
            name = function.__qualname__.removesuffix(".__init__")
            assert message.startswith(f"{name}() got an unexpected keyword argument '{word}'; it takes "), (
                message
            )


@pytest.mark.parametrize("name", CALLS)
def test_signatures_show_no_unknown_keywords(name: str) -> None:
    function, _ = CALLS[name]
    assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    assert function.__code__.co_flags & inspect.CO_VARKEYWORDS


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("attention", "is_causal", "is_causal: write mask=masks.Causal(), offset=0"),
        ("attention", "causal", "causal: write mask=masks.Causal()"),
        ("attention", "dropout_p", "dropout_p: write dropout="),
        ("attention", "softmax_scale", "softmax_scale: write scale="),
        ("attention", "enable_gqa", "enable_gqa: leave it out: k and v may have fewer heads than q"),
        ("attention", "window_size", "window_size: write mask=masks.Window(left, right) for distances, "
         "with None for no limit"),
        ("attention", "cu_seqlens_q", "cu_seqlens_q: call regard.packing.varlen_attention"),
        ("evidence", "dropout_p", "dropout_p: leave it out: facts describe the weights before dropout"),
        ("linear_attention", "is_causal", "is_causal: write causal="),
        ("linear_attention", "key_padding_mask",
         "key_padding_mask: write lengths=, the number of real tokens"),
        ("weights", "need_weights", "need_weights: leave it out: the result is the weights"),
        ("Attention", "attn_mask", "attn_mask: write mask=, a mask of regard.masks"),
        ("Attention", "need_weights", "need_weights: leave it out: a call takes `return_weights`"),
        ("varlen_attention", "window_size",
         "window_size: write window=(left, right), with None for no limit"),
        ("varlen_attention", "max_seqlen_q", "max_seqlen_q: leave it out: it follows from the cu_seqlens"),
        ("KVCache", "is_causal", "is_causal: leave it out: a cache attends causally"),
        ("PagedCache", "window_size", "window_size: write window=n for n keys, the query's own included"),
        ("LinearCache", "dropout_p", "dropout_p: leave it out: a cache has no dropout"),
        ("Attention", "num_kv_heads", "num_kv_heads: write kv_heads="),
        ("Attention", "batch_first", "batch_first: leave it out: x is (B, L, d_model)"),
        ("Attention.forward", "is_causal", "is_causal: write mask=masks.Causal()"),
        ("Attention.forward", "attn_mask",
         "attn_mask: write mask=, a mask or a bool tensor with True = may attend"),
    ],
)  # fmt: skip
def test_answers(name: str, word: str, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        CALLS[name][1](**{word: None})


def test_a_name_of_another_library_is_named_before_the_argument_that_it_replaces() -> None:
    with pytest.raises(TypeError, match=r"^num_heads: write heads=$"):
        nn.Attention(8, num_heads=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^embed_dim: write d_model=$"):
        nn.LatentAttention(embed_dim=8, num_heads=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'heads'"):
        nn.Attention(8)  # type: ignore[call-arg]


def test_an_unknown_word_lists_the_options() -> None:
    message = str(unknown_keyword(regard.weights, ["speed"]))
    assert message.startswith(
        "weights() got an unexpected keyword argument 'speed'; it takes q, k, v, mask, "
    )


def test_functions_that_build_an_attention_pass_the_words_on() -> None:
    for make in (nn.SelfAttention, nn.EncoderBlock, nn.DecoderBlock):
        with pytest.raises(TypeError, match=r"^is_causal: write mask=masks\.Causal\(\)$"):
            make(8, heads=2, is_causal=True)
    with pytest.raises(TypeError, match=r"^attn_mask: write mask="):
        nn.DecoderBlock(8, 2)(X, attn_mask=None)


# What the answers say gives the result of the other library.


def sdpa(**options: Any) -> Tensor:
    return F.scaled_dot_product_attention(Q, K, V, enable_gqa=True, **options)


def flash(**options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    out: Tensor = flash_attn.flash_attn_func(q, k, v, **options)
    return out.transpose(1, 2)


def test_answers_give_the_same_results() -> None:
    keep, added = torch.rand(LQ, LK) < 0.7, torch.randn(LQ, LK)
    keep[:, 0] = True
    slopes = torch.rand(H)
    for expected, options in (
        (sdpa(is_causal=True), {"mask": masks.Causal(), "offset": 0}),
        (sdpa(attn_mask=keep), {"mask": keep}),
        (sdpa(attn_mask=added), {"bias": added}),
        (flash(causal=True), {"mask": masks.Causal()}),
        (flash(window_size=(2, 1)), {"mask": masks.Window(2, 1)}),
        (flash(window_size=(3, -1)), {"mask": masks.Window(3, None)}),
        (flash(softmax_scale=0.3), {"scale": 0.3}),
        (flash(alibi_slopes=slopes), {"bias": scores.Alibi(slopes)}),
    ):
        assert_close(regard.attention(Q, K, V, **options), expected)


def test_key_padding_mask_of_multihead_attention() -> None:
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ignored = torch.tensor([[False] * 5, [False, False, False, True, True]])
    expected, _ = theirs(X, X, X, key_padding_mask=ignored, need_weights=False)
    ours = nn.Attention(8, 2)
    ours.load_state_dict(
        {
            "qkv.weight": theirs.in_proj_weight, "qkv.bias": theirs.in_proj_bias,
            "out.weight": theirs.out_proj.weight, "out.bias": theirs.out_proj.bias,
        }
    )  # fmt: skip
    assert_close(ours(X, mask=masks.padding(~ignored)), expected)
