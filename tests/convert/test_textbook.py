"""Tests `convert.from_textbook` with textbook classes of many names: equal outputs and weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import convert, masks as M
from regard.nn import Attention, PostNorm, PreNorm
from support import HAVE_CORE, assert_close
from support.modules import randomized
from support.textbook import TextbookAttention
from support.tracing import check_traced

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
B, L, LK, E, HEADS = 2, 7, 5, 24, 4

NAMES: dict[str, tuple[str, ...]] = {
    "capitals": ("W_Q", "W_K", "W_V", "W_O"),
    "small": ("w_q", "w_k", "w_v", "w_o"),
    "plural": ("w_qs", "w_ks", "w_vs", "fc"),
    "words": ("query", "key", "value", "dense"),
    "linear": ("q_linear", "k_linear", "v_linear", "out"),
    "projections": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "to": ("to_q", "to_k", "to_v", "to_out"),
    "letters": ("q", "k", "v", "o"),
    "W words": ("W_query", "W_key", "W_value", "output"),
    "no output": ("W_Q", "W_K", "W_V"),
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("bias", [False, True])
def test_names_of_textbooks(names: str, bias: bool) -> None:
    theirs = randomized(TextbookAttention(E, HEADS, d_k=5, d_v=7, names=NAMES[names], bias=bias))
    ours = convert.from_textbook(theirs.state_dict(), HEADS)
    assert isinstance(ours, Attention)
    q, k, v = torch.randn(B, L, E), torch.randn(B, LK, E), torch.randn(B, LK, E)
    for inputs in ((q,), (q, k), (q, k, v)):
        out, w = ours(*inputs, return_weights=True)
        expected, expected_w = theirs(*inputs)
        assert_close(out, expected)
        assert_close(w, expected_w)


WIDTHS: dict[str, dict[str, int]] = {
    "cross": {"E_k": 10, "E_v": 10},
    "all different": {"E_k": 10, "E_v": 13},
    "values": {"E_v": 13},
}


@pytest.mark.parametrize("widths", WIDTHS)
def test_widths_of_inputs(widths: str) -> None:
    theirs = randomized(TextbookAttention(E, HEADS, d_k=5, **WIDTHS[widths]))
    ours = convert.from_textbook(theirs.state_dict(), HEADS)
    sizes = {"E_k": E, "E_v": E} | WIDTHS[widths]
    x, keys, values = torch.randn(B, L, E), torch.randn(B, LK, sizes["E_k"]), torch.randn(B, LK, sizes["E_v"])
    values = keys if widths == "cross" else values
    out, w = ours(x, keys, values, return_weights=True)
    expected, expected_w = theirs(x, keys, values)
    assert_close(out, expected)
    assert_close(w, expected_w)


@pytest.mark.parametrize("norm", ["layer_norm", "norm", "LayerNorm", "ln_1"])
def test_residual_and_norm(norm: str) -> None:
    theirs = randomized(TextbookAttention(E, HEADS, norm=norm, eps=1e-6))
    residual: Any = partial(PostNorm, norm=partial(nn.LayerNorm, eps=1e-6))
    ours = convert.from_textbook(theirs.state_dict(), HEADS, residual=residual)
    assert isinstance(ours, PostNorm)
    x, mask = torch.randn(B, L, E), torch.ones(L, L).tril()
    out, w = ours(x, mask=M.Causal(), return_weights=True)
    expected, expected_w = theirs(x, mask=mask)
    assert_close(out, expected)
    assert_close(w, expected_w)
    pre = convert.from_textbook(theirs.state_dict(), HEADS, residual=PreNorm)
    assert_close(pre.sublayer(x), ours.sublayer(x))


def renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Replaces the first parts of the names."""
    return {f"{names[name.split('.')[0]]}.{name.split('.')[1]}": x for name, x in state.items()}


def packed(state: dict[str, Tensor], name: str, parts: tuple[str, ...]) -> dict[str, Tensor]:
    """Concatenates the projections `parts` under one name."""
    rest = {key: x for key, x in state.items() if key.split(".")[0] not in parts}
    return rest | {
        f"{name}.{end}": torch.cat([state[f"{p}.{end}"] for p in parts]) for end in ("weight", "bias")
    }


FORMS: dict[str, Any] = {
    "list": lambda s: renamed(s, {f"W_{x}": f"linears.{i}" for i, x in enumerate("QKVO")}),
    "wrapped": lambda s: {f"decoder.layers.3.cross_attn.{name}": x for name, x in s.items()},
    "sequential": lambda s: renamed(s, {"W_Q": "to_q", "W_K": "to_k", "W_V": "to_v", "W_O": "to_out.0"}),
    "nested": lambda s: renamed(s, {"W_Q": "query.linear", "W_K": "key.linear", "W_V": "value.linear",
                                    "W_O": "output"}),
    "bert": lambda s: renamed(s, {"W_Q": "attention.self.query", "W_K": "attention.self.key",
                                  "W_V": "attention.self.value", "W_O": "attention.output.dense"}),
    "qkv": lambda s: packed(s, "qkv", ("W_Q", "W_K", "W_V")),
    "packed_proj": lambda s: packed(s, "packed_proj", ("W_Q", "W_K", "W_V")),
    "kv": lambda s: packed(s, "to_kv", ("W_K", "W_V")),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_state_dicts(form: str) -> None:
    theirs, x = randomized(TextbookAttention(E, HEADS)), torch.randn(B, L, E)
    ours = convert.from_textbook(FORMS[form](theirs.state_dict()), HEADS)
    assert_close(ours(x), theirs(x)[0])


def test_a_prefix_chooses_one_layer() -> None:
    layers, x = nn.ModuleList(randomized(TextbookAttention(E, HEADS)) for _ in range(2)), torch.randn(B, L, E)
    ours = convert.from_textbook(layers.state_dict(), HEADS, prefix="1.")
    assert_close(ours(x), layers[1](x)[0])
    with pytest.raises(ValueError, match=r"one entry for q\.weight, got 0\.W_Q\.weight and 1\.W_Q\.weight"):
        convert.from_textbook(layers.state_dict(), HEADS)


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 13}], ids=str)
def test_pytorchs_module(widths: dict[str, int]) -> None:
    """Its weights are packed in in_proj_weight, or separate, but its biases are always packed."""
    theirs = randomized(nn.MultiheadAttention(E, HEADS, batch_first=True, **widths))
    ours = convert.from_textbook(theirs.state_dict(), HEADS)
    x, keys = torch.randn(B, L, E), torch.randn(B, LK, widths.get("kdim", E))
    values = torch.randn(B, LK, widths.get("vdim", E))
    expected, expected_w = theirs(x, keys, values, average_attn_weights=False)
    out, w = ours(x, keys, values, return_weights=True)
    assert_close(out, expected)
    assert_close(w, expected_w)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(kv_heads: int) -> None:
    source = randomized(Attention(E, HEADS, kv_heads=kv_heads))
    rows = dict(zip("qkv", source.qkv.weight.split(source._widths), strict=True))
    separate = {f"{n}_proj.weight": x for n, x in rows.items()} | {"o_proj.weight": source.out.weight}
    biases = dict(zip("qkv", source.qkv.bias.split(source._widths), strict=True))
    separate |= {f"{n}_proj.bias": x for n, x in biases.items()} | {"o_proj.bias": source.out.bias}
    x = torch.randn(B, L, E)
    assert_close(convert.from_textbook(separate, HEADS)(x), source(x))
    state = {"Wqkv.weight": source.qkv.weight, "Wqkv.bias": source.qkv.bias}
    state |= {"out_proj.weight": source.out.weight, "out_proj.bias": source.out.bias}
    assert_close(convert.from_textbook(state, HEADS, kv_heads=kv_heads)(x), source(x))
    with pytest.raises((ValueError, RuntimeError), match=r"out\.weight: expected shape|multiple of"):
        convert.from_textbook(state, HEADS)


def test_a_missing_bias_of_keys_is_zero() -> None:
    """Whisper's keys have no bias."""
    theirs, x = randomized(TextbookAttention(E, HEADS)), torch.randn(B, L, E)
    nn.init.zeros_(theirs.W_K.bias)
    state = {name: p for name, p in theirs.state_dict().items() if name != "W_K.bias"}
    assert_close(convert.from_textbook(state, HEADS)(x), theirs(x)[0])


def test_options_and_dtype_of_the_module() -> None:
    theirs = TextbookAttention(E, HEADS).double()
    ours = convert.from_textbook(theirs.state_dict(), HEADS, mask=M.Causal(), dropout=0.1)
    assert ours.mask == M.Causal()
    assert ours.dropout == 0.1
    assert ours.qkv.weight.dtype is torch.float64
    before = ours.qkv.weight.clone()
    nn.init.zeros_(theirs.W_Q.weight)  # the weights are copies
    assert torch.equal(ours.qkv.weight, before)


STATE = TextbookAttention(E, HEADS, norm="norm").state_dict()
PLAIN = TextbookAttention(E, HEADS).state_dict()
WRONG: dict[str, Any] = {
    "no norm chosen": (STATE, {}, "expected PostNorm, norm(x + attention(x)), or PreNorm"),
    "no norm": (PLAIN, {"residual": PostNorm}, "residual: expected None for a state_dict without a norm"),
    "two outputs": (
        PLAIN | {"fc.weight": PLAIN["W_O.weight"]}, {}, "for out.weight, got W_O.weight and fc.weight"),
    "packed too": (PLAIN | {"qkv.weight": PLAIN["W_O.weight"]}, {}, "got weights of q, k, v, qkv"),
    "unknown": (PLAIN | {"temperature": torch.ones(())}, {}, "got also temperature"),
    "feed-forward": (PLAIN | {"linear1.weight": PLAIN["W_O.weight"]}, {}, "got also linear1.weight"),
    "missing": ({"W_Q.weight": PLAIN["W_Q.weight"]}, {}, "got weights of q"),
    "parameters": ({"W_Q": torch.ones(E, E)}, {}, "transpose it too if the class computes x @ W_Q"),
    "heads": (PLAIN, {"heads": 5}, "expected a multiple of 5 channels of queries, got 24"),
    "key heads": (PLAIN, {"kv_heads": 2}, "kv_heads: expected 4"),
    "two biases": (PLAIN | {"kv.bias": torch.ones(2 * E)}, {}, "expected one bias for k"),
    "short bias": (PLAIN | {"W_K.bias": torch.ones(3)}, {}, "expected a bias (24,) of k"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_ambiguous_or_wrong_state_dicts(case: str) -> None:
    state, options, message = WRONG[case]
    with pytest.raises(ValueError) as caught:
        convert.from_textbook(state, **{"heads": HEADS} | options)
    assert message in str(caught.value)


def test_a_module_instead_of_its_state_dict() -> None:
    with pytest.raises(TypeError, match=r"module\.state_dict\(\)"):
        convert.from_textbook(TextbookAttention(E, HEADS), HEADS)  # type: ignore[arg-type]


def test_a_converted_module_is_traced() -> None:
    module = convert.from_textbook(TextbookAttention(E, HEADS).state_dict(), HEADS).eval()
    check_traced(module.forward, [torch.randn(B, L, E)])
    check_traced(module.forward, [torch.randn(B, n, E) for n in (L, LK, LK)])
