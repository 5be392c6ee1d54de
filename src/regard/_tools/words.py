"""Keywords of other libraries: the error for such a keyword says what to write in Regard.

A public function takes `**unknown: NoReturn`, raises `unknown_keyword(function, unknown)` if `unknown`
is not empty, and is decorated with `hide_unknown`. A constructor with required arguments is decorated
with `check_keywords` instead, a function that passes its options to a constructor with `check_options`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

ANY = ""  # any function that has all options in the text

# function -> what to write -> keywords of other libraries, separated by spaces
FORMS = {
    ANY: {
        "write mask= for a bool tensor (True = may attend), bias= for a float tensor": "attn_mask attn_bias",
        "write mask=masks.from_hf_2d(attention_mask) for a tokenizer's mask (B, L)": "attention_mask",
        "write mask=masks.padding(~key_padding_mask), where True = real token": "key_padding_mask",
        "write mask=masks.Lengths(lengths)": "lengths",
        "write mask=masks.Causal(), offset=0": "is_causal",
        "write mask=masks.Causal()": "causal",
        "write mask=masks.sliding(n) for n keys, the query's own included": "window sliding_window",
        "write mask=masks.Window(left, right) for distances, with None for no limit": "window_size",
        "write mask=masks.from_flex(block_mask)": "block_mask",
        "write mask=, a mask of regard.masks": "mask_mod",
        "write bias= or softcap=, or call regard.compat.flex_attention.flex_attention": "score_mod",
        "write bias=scores.Alibi(alibi_slopes)": "alibi_slopes",
        "write dropout=": "dropout_p p attn_drop attention_dropout",
        "write scale=": "softmax_scale sm_scale scaling",
        "write softcap=": "logits_soft_cap logit_cap soft_cap attn_logit_softcapping",
        "write sink=": "sinks s_aux learnable_sink",
        "write impl=": "backend op",
        "write return_lse=True": "return_softmax_lse return_aux",
        "write return_lse=True for the LSE, or call regard.weights": "return_attn_probs",
        "call regard.weights with the same arguments": "need_weights output_attentions return_weights",
        "call regard.packing.varlen_attention":
            "cu_seqlens cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        "use regard.cache.PagedCache": "block_table seqused_k",
        "leave it out: k and v may have fewer heads than q": "enable_gqa",
        "leave it out: multiply the output of each head by head_mask": "head_mask",
        "leave it out: results do not depend on the number of threads": "deterministic",
    },
    "varlen_attention": {
        "write mask= for a mask of regard.masks, bias= for a float tensor": "attn_mask attn_bias",
        "write window=(left, right), with None for no limit": "window_size",
        "write window=": "sliding_window",
        "write cu_seqlens_q=": "cu_seqlens",
        "write cu_seqlens_q=packing.cu_seqlens(lengths)": "lengths",
        "leave it out: it follows from the cu_seqlens": "max_seqlen_q max_seqlen_k",
        "leave it out: packed sequences have no padding": "attention_mask key_padding_mask",
    },
    "linear_attention": {
        "write causal=": "is_causal",
        "write lengths=": "seqlens",
        "write lengths=, the number of real tokens": "attn_mask attention_mask key_padding_mask mask",
        "leave it out: linear attention has no dropout": "dropout dropout_p p",
    },
    "weights": {"leave it out: the result is the weights": "need_weights output_attentions return_weights"},
    "evidence": {"leave it out: facts describe the weights before dropout": "dropout dropout_p p"},
    "attend": {
        "write window=n for n keys, the query's own included": "sliding_window window_size",
        "write lengths=, the number of real new tokens": "attention_mask key_padding_mask cu_seqlens_q",
        "leave it out: a cache attends causally": "is_causal causal",
        "leave it out: a cache has no dropout": "dropout dropout_p p",
        "leave it out: the cache counts its tokens": "offset cache_seqlens",
    },
    "forward": {
        "write mask=, a mask or a bool tensor with True = may attend": "attn_mask attn_bias",
        "write lengths=, or mask=masks.padding(~key_padding_mask), where True = real": "key_padding_mask",
        "write mask=masks.Causal()": "is_causal",
        "write context=": "memory encoder_hidden_states",
        "write cache=": "past_key_value past_key_values layer_past",
        "write positions=": "position_ids",
        "write cu_seqlens=": "cu_seqlens_q",
        "write context_cu_seqlens=": "cu_seqlens_k",
        "leave it out: the constructor takes it": "dropout dropout_p softmax_scale scale softcap sink bias",
        "write return_weights=True": "need_weights output_attentions",
    },
    "__init__": {
        "write d_model=": "embed_dim hidden_size dim",
        "write heads=": "num_heads n_heads n_head nheads nhead h num_attention_heads",
        "write kv_heads=": "num_kv_heads n_kv_heads num_key_value_heads",
        "write head_dim=": "dim_head",
        "write kv_model=, the width of the context": "kdim",
        "write value_model=, the width of the tokens of values": "vdim",
        "write bias=": "qkv_bias attention_bias use_bias",
        "write mask=masks.Causal()": "is_causal",
        "write mask=, a mask of regard.masks": "attn_mask attn_bias",
        "leave it out: a call takes `lengths` and `mask`": "key_padding_mask attention_mask",
        "leave it out: a call takes `return_weights`": "need_weights output_attentions return_weights",
        "leave it out: x is (B, L, d_model)": "batch_first",
        "use regard.nn.MultiheadAttention, which has it": "add_bias_kv add_zero_attn",
    },
    "AdditiveAttention.forward": {
        "write lengths=, with padded sequences":
            "valid_lens valid_len cu_seqlens cu_seqlens_q cu_seqlens_k context_cu_seqlens",
        "write return_weights=True": "need_weights output_attentions",
    },
    "AdditiveAttention.__init__": {
        "write hidden=": "num_hiddens hidden_dim units",
        "write d_model=, and hidden= for the hidden layer": "hidden_size",
        "leave it out: additive attention has one head":
            "heads num_heads n_heads n_head nheads nhead h num_attention_heads",
    },
}  # fmt: skip
WORDS = {
    function: {word: form for form, words in forms.items() for word in words.split()}
    for function, forms in FORMS.items()
}


def hide_unknown(function: F) -> F:
    """Removes `*extra` and `**unknown` from the signature that `inspect.signature` and `help` show."""
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def check_keywords(init: F) -> F:
    """Wraps `__init__` so that an unknown keyword is named before a required argument that is missing.

    `Attention(64, num_heads=8)` lacks `heads`, because of the unknown keyword.
    """
    return check_options(init)(hide_unknown(init))


def check_options(init: Callable[..., Any]) -> Callable[[F], F]:
    """Does the same as `check_keywords` for a function that passes its options to the constructor `init`."""

    def decorated(function: F) -> F:
        names = {*inspect.signature(init).parameters, *inspect.signature(function).parameters}

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            if unknown := [name for name in options if name not in names]:
                raise unknown_keyword(init, unknown)
            return function(*args, **options)

        return checked  # type: ignore[return-value]

    return decorated


def unknown_keyword(function: Callable[..., Any], unknown: Iterable[str]) -> TypeError:
    """Returns the error for a call of `function` with keywords that the function does not have."""
    word = next(iter(unknown))
    parameters = inspect.signature(function).parameters.values()
    options = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_POSITIONAL]
    for name in (function.__qualname__, function.__name__, ANY):
        form = WORDS.get(name, {}).get(word)
        if form is not None and set(re.findall(r"(\w+)=", form)) <= set(options):
            return TypeError(f"{word}: {form}")
    name = function.__qualname__.removesuffix(".__init__")
    return TypeError(f"{name}() got an unexpected keyword argument {word!r}; it takes {', '.join(options)}")
