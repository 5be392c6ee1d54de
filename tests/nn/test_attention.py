"""Compares `MultiheadAttention` and `Attention` with PyTorch on the same weights; tests errors."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import regard
from regard import masks as M, packing
from regard._api.projection import linear
from regard.cache import LatentCache, LinearCache
from regard.nn import Attention, Memory, MultiheadAttention, _weights
from regard.nn._torch_masks import arguments
from regard.positions import AlibiBias, Relative, Rotary
from support import HAVE_CORE, assert_close, rel_l2
from support.modules import ListCache, causal_mask, randomized

pytestmark = [
    pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built"),
    # Warnings of PyTorch itself: while it compiles, and at the first nested tensor.
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]
LIMIT = 2e-6  # largest relative difference in float32


# MultiheadAttention compared with PyTorch's in float64

E, HEADS, B, LQ, LK = 24, 3, 2, 7, 11
Options = dict[str, Any]


def bool_mask() -> Tensor:
    """Returns (Lq, Lk), True = may not attend. Every query may attend to key 0."""
    mask = torch.rand(LQ, LK) > 0.6
    mask[:, 0] = False
    return mask


def padding_mask() -> Tensor:
    ignored = torch.zeros(B, LK, dtype=torch.bool)
    ignored[1, 6:] = True
    return ignored


MASKS: dict[str, Any] = {
    "none": dict,
    "bool": lambda: {"attn_mask": bool_mask()},
    "float": lambda: {"attn_mask": torch.randn(LQ, LK)},
    "heads": lambda: {"attn_mask": torch.stack([bool_mask() for _ in range(B * HEADS)])},
    "padding": lambda: {"key_padding_mask": padding_mask()},
    "both": lambda: {"attn_mask": bool_mask(), "key_padding_mask": padding_mask()},
    "floats": lambda: {"attn_mask": torch.randn(B * HEADS, LQ, LK), "key_padding_mask": torch.randn(B, LK)},
}
FLAGS = ("batch_first", "widths", "add_bias_kv", "add_zero_attn", "bias", "need_weights", "average")
GRID = [*itertools.product((False, True), repeat=len(FLAGS))]
SAMPLE = random.Random(0).sample(GRID, 24)


def modules(options: Options) -> tuple[Any, Any]:
    """Returns PyTorch's module in float64 and ours in float32, with the same weights."""
    theirs = randomized(nn.MultiheadAttention(E, HEADS, **options))
    ours = MultiheadAttention(E, HEADS, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs.double(), ours


def in_float64(options: Options) -> Options:
    return {
        k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in options.items()
    }


def compare(theirs: Any, ours: Any, inputs: tuple[Tensor, ...], options: Options) -> None:
    """Compares outputs, weights and the gradients of all inputs and parameters."""
    inputs32 = [x.clone().requires_grad_() for x in inputs]
    inputs64 = [x.double().requires_grad_() for x in inputs]
    result, expected = ours(*inputs32, **options), theirs(*inputs64, **in_float64(options))
    dout = torch.randn(result[0].shape)
    loss, reference = (result[0] * dout).sum(), (expected[0] * dout).sum()
    assert rel_l2(result[0], expected[0]) < LIMIT
    assert (result[1] is None) == (expected[1] is None)
    if result[1] is not None:
        dw = torch.randn(result[1].shape)
        assert rel_l2(result[1], expected[1]) < LIMIT
        loss, reference = loss + (result[1] * dw).sum(), reference + (expected[1] * dw).sum()
    grads = torch.autograd.grad(loss, [*inputs32, *ours.parameters()])
    expected_grads = torch.autograd.grad(reference, [*inputs64, *theirs.parameters()])
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert rel_l2(grad, expected_grad) < LIMIT or expected_grad.norm() < 1e-12


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("grid", [SAMPLE, pytest.param(GRID, marks=pytest.mark.full)], ids=["some", "all"])
def test_multihead_matches_pytorch(masks: str, grid: list[tuple[bool, ...]]) -> None:
    for flags in grid:
        options = dict(zip(FLAGS, flags, strict=True))
        call_options = {
            "need_weights": options.pop("need_weights"),
            "average_attn_weights": options.pop("average"),
        }
        kdim, vdim = (13, 10) if options.pop("widths") else (E, E)
        theirs, ours = modules(options | {"kdim": kdim, "vdim": vdim})
        widths = zip((LQ, LK, LK), (E, kdim, vdim), strict=True)
        inputs = [torch.randn(B, L, width) for L, width in widths]
        if not options["batch_first"]:
            inputs = [x.transpose(0, 1) for x in inputs]
        compare(theirs, ours, tuple(inputs), call_options | MASKS[masks]())


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("same", ["all", "key is value", "unbatched"])
def test_multihead_projects_equal_inputs_once(batch_first: bool, same: str) -> None:
    theirs, ours = modules({"batch_first": batch_first})
    x, y = torch.randn(5, 7, E), torch.randn(5, 7, E)
    if same == "unbatched":
        x, y = x[0], y[0]
    for q, k in ((x, x), (x, y)) if same == "unbatched" else (((x, x),) if same == "all" else ((x, y),)):
        out, w = ours(q, k, k)
        expected, expected_w = theirs(q.double(), k.double(), k.double())
        assert rel_l2(out, expected) < LIMIT
        assert rel_l2(w, expected_w) < LIMIT
        assert out.shape == expected.shape
        assert w.shape == expected_w.shape


@pytest.mark.parametrize(
    "extra_keys", [{}, {"add_bias_kv": True}, {"add_bias_kv": True, "add_zero_attn": True}]
)
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_needs_no_mask(extra_keys: Options, need_weights: bool) -> None:
    theirs, ours = modules({"batch_first": True} | extra_keys)
    x = torch.randn(B, LQ, E)
    hint = {"attn_mask": causal_mask(LQ), "is_causal": True, "need_weights": need_weights}
    out, w = ours(x, x, x, is_causal=True, need_weights=need_weights)
    with_mask, _ = ours(x, x, x, **hint)
    expected, expected_w = theirs(*[x.double()] * 3, **in_float64(hint | {"is_causal": False}))
    assert rel_l2(out, expected) < LIMIT
    assert rel_l2(with_mask, expected) < LIMIT
    assert w is None or rel_l2(w, expected_w) < LIMIT


def test_masks_broadcast_over_heads() -> None:
    _, ours = modules({"batch_first": True})
    q, k = torch.randn(B, LQ, E), torch.randn(B, LK, E)
    mask = torch.stack([bool_mask() for _ in range(B)])
    expected, _ = ours(q, k, k, attn_mask=mask.repeat_interleave(HEADS, 0))
    for form in (mask, mask[:, None], mask[:, None].expand(B, HEADS, LQ, LK)):
        assert_close(ours(q, k, k, attn_mask=form)[0], expected)


REGARD_MASKS: dict[str, Any] = {
    "causal": M.create_causal_mask(LQ, LK),
    "padding": M.create_padding_mask(torch.tensor([[1] * LK, [1] * 6 + [0] * 5])),
    "decoder": M.create_decoder_mask(torch.tensor([[1] * LK, [0] * 2 + [1] * 9])),
    "heads": M.PerHead([M.Causal(), M.Window(2, 2), M.Prefix(4)]),
    "samples": M.Dense(torch.stack([~padding_mask()] * LQ, 1)[:, None]),
}


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["", "extra"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", REGARD_MASKS)
def test_multihead_takes_masks_of_regard(
    extra: Options, need_weights: bool, is_causal: bool, name: str
) -> None:
    """A Mask says which keys a query may attend to, a bool tensor which keys it may not."""
    theirs, ours = modules({"batch_first": True} | extra)
    mask, inputs = REGARD_MASKS[name], (torch.randn(B, LQ, E), torch.randn(B, LK, E), torch.randn(B, LK, E))
    keep = mask.to_dense(LQ, LK, heads=HEADS)
    keep = keep & torch.ones(LQ, LK).tril().bool() if is_causal else keep
    hidden = ~keep.expand(B, HEADS, LQ, LK).flatten(0, 1)
    expected, expected_w = theirs(*(x.double() for x in inputs), attn_mask=hidden, need_weights=need_weights)
    visible = torch.ones(B, LQ, E, dtype=torch.bool)
    if not extra:  # PyTorch's result of a fully masked row is NaN
        visible = ~hidden.view(B, HEADS, LQ, LK).all(-1).any(1)[..., None].expand(B, LQ, E)
    for form in ({"attn_mask": mask}, {"key_padding_mask": mask}):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                out, w = ours(*inputs, **form, need_weights=need_weights, is_causal=is_causal)
            assert rel_l2(out[visible], expected[visible]) < LIMIT
            assert w is None or rel_l2(w[visible[..., 0]], expected_w[visible[..., 0]]) < LIMIT


def test_multihead_combines_masks_of_regard_with_tensors() -> None:
    _, ours = modules({"batch_first": True})
    q, k = torch.randn(B, LQ, E), torch.randn(B, LK, E)
    hidden, ignored, added = bool_mask(), padding_mask(), torch.randn(LQ, LK)
    window = M.Window(3, 3) | M.Prefix(1)
    outside = ~window.to_dense(LQ, LK)
    expected, _ = ours(q, k, k, attn_mask=outside, key_padding_mask=ignored)
    assert_close(ours(q, k, k, attn_mask=window, key_padding_mask=ignored)[0], expected)
    expected, _ = ours(q, k, k, attn_mask=outside | hidden)
    assert_close(ours(q, k, k, attn_mask=hidden, key_padding_mask=window)[0], expected)
    expected, _ = ours(q, k, k, attn_mask=added.masked_fill(outside, -torch.inf))
    assert_close(ours(q, k, k, attn_mask=added, key_padding_mask=window)[0], expected)
    unbatched, _ = ours(q[0], k[0], k[0], attn_mask=window, key_padding_mask=M.Prefix(LK))
    assert_close(unbatched, ours(q, k, k, attn_mask=outside)[0][0])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_multihead_rejects_masks_of_other_sizes(need_weights: bool, extra: bool) -> None:
    ours, x = MultiheadAttention(24, 4, batch_first=True, add_zero_attn=extra), torch.randn(4, 7, 24)
    for mask, message in (
        (M.Dense(torch.ones(4, 7, 7).bool()), r"mask\[:, None\] .* mask\[None\]"),
        (M.Dense(torch.ones(3, 1, 7, 7).bool()), r"^mask: expected"),
        (M.Dense(torch.ones(7, 8).bool()), r"^mask: expected .*, got \(7, 8\)"),
        (M.PerHead([M.Causal()] * 3), "expected Hq = 4 masks, got 3"),
        (M.Lengths([7, 8, 7, 7]), "expected lengths up to Lk = 7"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(x, x, x, attn_mask=mask, need_weights=need_weights)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_rejects_float_masks_of_zeros_and_ones(is_causal: bool, need_weights: bool) -> None:
    ours, x = MultiheadAttention(24, 4, batch_first=True), torch.randn(2, 7, 24)
    options = {"is_causal": is_causal, "need_weights": need_weights}
    visible = torch.ones(7, 7).tril()
    for mask in (visible, visible.expand(8, 7, 7), visible.expand(2, 7, 7), visible.expand(2, 1, 7, 7)):
        with pytest.raises(ValueError, match=r"attn_mask: .* zeros and ones.* attn_mask == 0"):
            ours(x, x, x, attn_mask=mask, **options)
    with pytest.raises(ValueError, match=r"key_padding_mask: .* zeros and ones"):
        ours(x, x, x, key_padding_mask=torch.ones(2, 7), **options)
    zeros = ours(x, x, x, attn_mask=torch.zeros(7, 7), key_padding_mask=torch.zeros(2, 7), **options)
    assert_close(zeros[0], ours(x, x, x, **options)[0])


def test_fully_masked_rows() -> None:
    _, ours = modules({"batch_first": True, "dropout": 0.2})
    q, k = torch.randn(B, LQ, E, requires_grad=True), torch.randn(B, LK, E)
    ignored = torch.zeros(B, LK, dtype=torch.bool)
    ignored[1] = True
    for training in (False, True):
        out, w = ours.train(training)(q, k, k, key_padding_mask=ignored)
        assert_close(out[1], ours.out_proj.bias.expand(LQ, E))
        assert not w[1].any()
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert not grad[1].any()
        assert grad.isfinite().all()


def test_weights_match_the_formula() -> None:
    _, ours = modules({"batch_first": True})
    q, k, mask = torch.randn(B, LQ, E), torch.randn(B, LK, E), bool_mask()
    mask[3] = True
    out, w = ours(q, k, k, attn_mask=mask, average_attn_weights=False)
    heads = [ours._heads(x) for x in ours._projected(q, k, k)]
    assert_close(w, regard.weights(*heads, mask=~mask))
    assert torch.equal(out, ours(q, k, k, attn_mask=mask, need_weights=False)[0])


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("tile_scores", [1, 2 * LQ * LK, 4 * LQ * LK, 2**18])
def test_fused_output_and_weights(
    masks: str, average: bool, tile_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients, weights are computed in tiles: one head, one sample or the whole batch."""
    monkeypatch.setattr(_weights, "TILE_SCORES", tile_scores)
    theirs, ours = modules({"batch_first": True})
    inputs = torch.randn(B, LQ, E), torch.randn(B, LK, E), torch.randn(B, LK, E)
    options = MASKS[masks]() | {"average_attn_weights": average}
    with torch.no_grad():
        out, w = ours(*inputs, **options)
        expected, expected_w = theirs(*(x.double() for x in inputs), **in_float64(options))
        assert rel_l2(out, expected) < LIMIT
        assert rel_l2(w, expected_w) < LIMIT


@pytest.mark.parametrize("form", ["bool", "float", "padding"])
@pytest.mark.parametrize("grad", [False, True])
def test_masked_nan_does_not_reach_outputs_or_weights(form: str, grad: bool) -> None:
    """Key 4 is NaN and masked for all queries. Query 2 is fully masked, except with padding."""
    _, ours = modules({"batch_first": True})
    q, k, v = torch.randn(B, LQ, E), torch.randn(B, LK, E), torch.randn(B, LK, E)
    hidden = torch.zeros(LQ, LK, dtype=torch.bool)
    hidden[:, 4] = hidden[2] = True
    zeros = torch.zeros(LQ, LK)
    mask = {
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": zeros.masked_fill(hidden, -torch.inf)},
        "padding": {"key_padding_mask": hidden[:1].expand(B, LK)},
    }[form]
    with torch.set_grad_enabled(grad):
        expected, expected_w = ours(q, k, v, **mask)
        k[:, 4] = v[:, 4] = torch.nan
        out, w = ours(q, k, v, **mask)
    assert_close(out, expected)
    assert_close(w, expected_w)
    if form != "padding":
        assert_close(out[:, 2], ours.out_proj.bias.expand(B, E))
        assert not w[:, 2].any()


def test_a_float_mask_of_zeros_and_infinities_becomes_bool() -> None:
    """PyTorch's layers pass float masks. Masked keys must be skipped as with bool masks."""
    mask = causal_mask(LQ)
    sizes = torch.empty(B, HEADS, LQ, 4), LQ, 0
    converted = arguments(mask, None, False, *sizes)
    assert converted.bias is None
    assert torch.equal(converted.mask.to_dense(LQ, LQ), mask == 0)
    for float_mask in (mask + 1, mask.masked_fill(mask < 0, torch.nan), torch.randn(LQ, LQ)):
        assert arguments(float_mask, None, False, *sizes).bias is float_mask


def test_returned_weights_are_before_dropout() -> None:
    _, ours = modules({"batch_first": True, "dropout": 0.5})
    x = torch.randn(B, LQ, E)
    torch.manual_seed(3)
    out, w = ours(x, x, x)
    assert_close(w.sum(-1), torch.ones(B, LQ))
    torch.manual_seed(3)
    repeated, _ = ours(x, x, x)
    assert torch.equal(out, repeated)
    without_dropout, _ = ours.eval()(x, x, x)
    assert rel_l2(out, without_dropout) > 0.01


def test_dropout_keeps_the_mean() -> None:
    _, ours = modules({"batch_first": True, "dropout": 0.3})
    x = torch.randn(1, LQ, E)
    mean = torch.stack([ours(x, x, x, need_weights=False)[0] for _ in range(600)]).mean(0)
    assert rel_l2(mean, ours.eval()(x, x, x, need_weights=False)[0]) < 0.06


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_multihead_in_16_bits(dtype: torch.dtype) -> None:
    theirs, ours = modules({"batch_first": True})
    x = torch.randn(B, LQ, E, dtype=dtype)
    out, _ = ours.to(dtype)(x, x, x, need_weights=False)
    expected, _ = copy.deepcopy(theirs).to(dtype).double()(*[x.double()] * 3)
    assert out.dtype is dtype
    assert rel_l2(out, expected) < (2e-2 if dtype is torch.bfloat16 else 3e-3)


def test_multihead_under_autocast() -> None:
    theirs, ours = modules({"batch_first": True})
    x = torch.randn(B, LQ, E)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ours(x, x, x, need_weights=False, attn_mask=causal_mask(LQ))
    assert out.dtype is torch.bfloat16
    expected, _ = theirs(*[x.double()] * 3, attn_mask=causal_mask(LQ).double())
    assert rel_l2(out, expected) < 2e-2


LAYOUTS = [torch.jagged, torch.strided]


def nested(sizes: list[int], layout: torch.layout, width: int = E) -> tuple[Tensor, list[Tensor]]:
    sequences = [torch.randn(n, width) for n in sizes]
    return torch.nested.nested_tensor(sequences, layout=layout), sequences


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_multihead_of_nested_tensors(layout: torch.layout, cross: bool, is_causal: bool) -> None:
    _, ours = modules({"batch_first": True})
    q, sequences = nested([5, 2, 7], layout)
    k, contexts = nested([3, 8, 4], layout) if cross else (q, sequences)
    out, w = ours(q, k, k, is_causal=is_causal)
    assert out.layout is layout
    for s, (x, y, sequence_out) in enumerate(zip(sequences, contexts, out.unbind(), strict=True)):
        expected, expected_w = ours(x, y, y, is_causal=is_causal)
        assert_close(sequence_out, expected)
        assert_close(w[s, : len(x), : len(y)], expected_w)
        assert not w[s, len(x) :].any()
        assert not w[s, :, len(y) :].any()


def test_gradients_of_nested_tensors() -> None:
    _, ours = modules({"batch_first": True})
    x, sequences = nested([5, 2, 7], torch.jagged)
    ours(x, x, x, need_weights=False)[0].values().sum().backward()
    grad = ours.in_proj_weight.grad.clone()
    ours.zero_grad()
    sum(ours(sequence, sequence, sequence, need_weights=False)[0].sum() for sequence in sequences).backward()
    assert rel_l2(grad, ours.in_proj_weight.grad) < 1e-5


# Inside PyTorch's layers


def swapped(layer: Any) -> Any:
    """Returns a copy of the layer with our attention and the same weights."""
    layer = copy.deepcopy(layer)
    for name, child in [*layer.named_modules()]:
        if type(child) is nn.MultiheadAttention:
            ours = MultiheadAttention(
                child.embed_dim, child.num_heads, child.dropout, batch_first=child.batch_first
            )
            ours.load_state_dict(child.state_dict())
            layer.set_submodule(name, ours.train(child.training))
    return layer


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_in_an_encoder_layer(training: bool, norm_first: bool, batch_first: bool) -> None:
    theirs = randomized(nn.TransformerEncoderLayer(
        24, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)).train(training)  # fmt: skip
    ours, x = swapped(theirs), torch.randn(5, 7, 24)
    padding = torch.zeros(x.shape[0 if batch_first else 1], x.shape[1 if batch_first else 0]).bool()
    padding[1, 4:] = True
    L = padding.shape[1]
    for mask in ({}, {"src_key_padding_mask": padding}, {"src_mask": causal_mask(L), "is_causal": True}):
        with torch.set_grad_enabled(training):
            expected = theirs.double()(x.double(), **in_float64(mask))
            assert rel_l2(ours(x, **mask), expected) < LIMIT
        theirs.float()


def test_an_encoder_layer_uses_our_attention_in_evaluation() -> None:
    theirs = randomized(nn.TransformerEncoderLayer(24, 4, 32, batch_first=True)).eval()
    ours, x = swapped(theirs), torch.randn(2, 7, 24)
    all_padding = torch.ones(2, 7, dtype=torch.bool)
    with torch.no_grad():
        assert theirs(x, src_key_padding_mask=all_padding).isnan().any()
        assert ours(x, src_key_padding_mask=all_padding).isfinite().all()


@pytest.mark.parametrize("swap_first", [False, True])
def test_in_an_encoder_that_makes_nested_tensors(swap_first: bool) -> None:
    layer = randomized(nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True))
    theirs = nn.TransformerEncoder(layer, 2).eval()
    ours = nn.TransformerEncoder(swapped(layer), 2).eval() if swap_first else swapped(theirs)
    x, padding = torch.randn(3, 7, 24), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = padding[2, 6:] = True
    with torch.no_grad():
        expected = theirs.double()(x.double(), src_key_padding_mask=padding)
        out = ours(x, src_key_padding_mask=padding)
    assert rel_l2(out[~padding], expected[~padding]) < LIMIT


@pytest.mark.parametrize("training", [False, True])
def test_in_a_decoder_layer(training: bool) -> None:
    theirs = randomized(nn.TransformerDecoderLayer(24, 4, 32, dropout=0.0, batch_first=True)).train(training)
    ours = swapped(theirs)
    x, memory = torch.randn(2, 7, 24), torch.randn(2, 5, 24)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    mask = {"tgt_mask": causal_mask(7), "tgt_is_causal": True, "memory_key_padding_mask": padding}
    expected = theirs.double()(x.double(), memory.double(), **in_float64(mask))
    assert rel_l2(ours(x, memory, **mask), expected) < LIMIT


# Errors and checkpoints


@pytest.mark.parametrize(
    ("changed_shapes", "message"),
    [
        ({"key": (2, 9, 24), "value": (2, 8, 24)}, "value: expected as many tokens as key"),
        ({"query": (2, 9, 23)}, r"query: expected \(L, 24\)"),
        ({"key": (3, 9, 24), "value": (3, 9, 24)}, r"expected one batch in dim 0 \(batch_first=True\)"),
        (
            {"attn_mask": (9, 7)},
            r"attn_mask: expected \(Lq, Lk\) = \(7, 9\).*got bool tensor of shape \(9, 7\)",
        ),
        ({"attn_mask": (3, 7, 9)}, "attn_mask: expected"),
        ({"key_padding_mask": (2, 7)}, r"key_padding_mask: .*\(B, Lk\) = \(2, 9\), got bool .*\(2, 7\)"),
        ({"key_padding_mask": (9, 2)}, "key_padding_mask: expected one row of keys for each sample"),
    ],
)
def test_wrong_calls(changed_shapes: dict[str, tuple[int, ...]], message: str) -> None:
    ours = MultiheadAttention(24, 4, batch_first=True)
    shapes = {"query": (2, 7, 24), "key": (2, 9, 24), "value": (2, 9, 24)} | changed_shapes
    kwargs = {k: torch.zeros(s, dtype=torch.bool if "mask" in k else None) for k, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        ours(**kwargs)


def test_wrong_mask_dtypes_and_nested_tensors() -> None:
    ours, x = MultiheadAttention(24, 4, batch_first=True), torch.randn(2, 7, 24)
    for name, mask in (("attn_mask", torch.zeros(7, 7)), ("key_padding_mask", torch.zeros(2, 7))):
        for wrong in (mask.long(), mask.byte(), mask.double(), mask.half()):
            with pytest.raises(TypeError, match=f"{name}: expected a bool tensor .*torch.float32.*, got "):
                ours(x, x, x, **{name: wrong})
    n, _ = nested([3, 4], torch.jagged)
    other, narrow = nested([3, 4, 2], torch.jagged)[0], nested([3, 4], torch.jagged, 23)[0]
    with pytest.raises(ValueError, match="key: expected as many sequences as query, 2, got 3"):
        ours(n, other, other)
    with pytest.raises(ValueError, match=r"value: expected a nested tensor \(N, j, 24\), got width 23"):
        ours(n, n, narrow)
    with pytest.raises(ValueError, match="key_padding_mask: expected None with nested tensors"):
        ours(n, n, n, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="embed_dim: expected a multiple of num_heads = 5, got 24"):
        MultiheadAttention(24, 5)
    with pytest.raises(ValueError, match="dropout: expected a probability from 0 to 1"):
        MultiheadAttention(24, 4, dropout=1.5)


@pytest.mark.parametrize("make", [lambda: MultiheadAttention(24, 4), lambda: Attention(24, 4, sink=True)])
@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(make: Any, damage: str) -> None:
    module, state = make(), {k: torch.zeros_like(v) for k, v in make().state_dict().items()}
    name = next(reversed(state))
    if damage == "missing":
        del state[name]
    elif damage == "extra":
        state["other"] = torch.zeros(1)
    else:
        state[name] = torch.zeros(7, 7)
    before = copy.deepcopy(module.state_dict())
    messages = {
        "missing": f"expected also {name}",
        "extra": "got also other",
        "shape": f"{name}: expected shape",
    }
    with pytest.raises(RuntimeError, match=f"nothing was loaded.*{messages[damage]}"):
        module.load_state_dict(state)
    assert all(torch.equal(x, module.state_dict()[k]) for k, x in before.items())
    if damage != "shape":
        module.load_state_dict(state, strict=False)


def test_state_dicts_load_in_both_directions() -> None:
    theirs, ours = nn.MultiheadAttention(24, 4, add_bias_kv=True), MultiheadAttention(24, 4, add_bias_kv=True)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(24, 4)
    torch.manual_seed(1)
    ours = MultiheadAttention(24, 4)
    assert all(map(torch.equal, theirs.parameters(), ours.parameters()))
    assert isinstance(ours, nn.MultiheadAttention)
    assert all(p.device.type == "meta" for p in MultiheadAttention(24, 4, device="meta").parameters())


def test_modules_are_saved_and_copied() -> None:
    for module, call in (
        (MultiheadAttention(24, 4), lambda m, x: m(x, x, x)[0]),
        (Attention(24, 4, position=Rotary(6), mask=M.Causal()), lambda m, x: m(x)),
    ):
        file, x = io.BytesIO(), torch.randn(5, 24)
        torch.save(module, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(module)):
            assert torch.equal(call(other, x), call(module, x))


# Attention


def test_attention_matches_the_formula() -> None:
    options = {"kv_heads": 2, "head_dim": 5, "value_dim": 7, "mask": M.Causal(), "sink": True, "softcap": 3.0}
    module = Attention(24, 6, scale=0.3, gate=True, qk_norm=nn.RMSNorm, **options)
    module = randomized(module).double()
    x = torch.randn(2, 9, 24).double()
    sizes = (30, 10, 14)
    projected = zip(module.qkv(x).split(sizes, -1), (6, 2, 2), strict=True)
    q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t, h in projected)
    q, k = module.q_norm(q), module.k_norm(k)
    out = regard.attention(
        q, k, v, mask=M.Causal(), sink=module.sink, softcap=3.0, scale=0.3, impl="reference"
    )
    gated = out.transpose(1, 2).flatten(2) * torch.sigmoid(x @ module.gate.weight.T)
    assert rel_l2(module(x), gated @ module.out.weight.T + module.out.bias) < 1e-12


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_matches_pytorch(kv_heads: int) -> None:
    """PyTorch's module gets each key head once for every query head of its group."""
    module = randomized(Attention(24, 4, kv_heads=kv_heads))
    theirs = nn.MultiheadAttention(24, 4, batch_first=True).double()
    sizes = (24, 6 * kv_heads, 6 * kv_heads)
    for name, packed in (("weight", module.qkv.weight), ("bias", module.qkv.bias)):
        q, k, v = packed.split(sizes)
        k, v = (
            t.unflatten(0, (kv_heads, 6)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1) for t in (k, v)
        )
        getattr(theirs, f"in_proj_{name}").data = torch.cat((q, k, v)).double().detach()
    theirs.out_proj.load_state_dict(module.out.state_dict())
    x, context = torch.randn(2, 7, 24), torch.randn(2, 5, 24)
    for other in (x, context):
        expected, _ = theirs(x.double(), other.double(), other.double())
        assert rel_l2(module(x) if other is x else module(x, other), expected) < LIMIT
    assert_close(module(x, x), module(x))
    assert_close(module(x[0], context[0]), module(x, context)[0])


def test_cross_attention_and_its_memory() -> None:
    module = regard.nn.CrossAttention(24, heads=4, kv_model=10)
    x, context, lengths = torch.randn(2, 7, 24), torch.randn(2, 5, 10), torch.tensor([5, 2])
    out = module(x, context, mask=M.Lengths(lengths))
    memory = module.remember(context)
    assert isinstance(memory, Memory)
    assert torch.equal(module(x, memory, mask=M.Lengths(lengths)), out)
    assert_close(out[1:], module(x[1:], context[1:, :2]))
    assert {name for name, _ in module.named_parameters()} == {
        "q.weight", "q.bias", "kv.weight", "kv.bias", "out.weight", "out.bias"}  # fmt: skip


RULES: dict[str, Any] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(4),
    "interleaved": lambda: Rotary(6, layout="interleaved"),
    "alibi": lambda: AlibiBias(4),
    "relative": lambda: Relative(4, num_buckets=8, max_distance=20),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mask", [None, M.Causal(), M.Window(3, 0)], ids=repr)
def test_padded_packed_and_nested_agree(rule: str, mask: M.Mask | None) -> None:
    module = randomized(Attention(24, 4, kv_heads=2, position=RULES[rule](), mask=mask, sink=True))
    sizes = [5, 2, 7]
    lengths, cu = torch.tensor(sizes), packing.cu_seqlens(sizes)
    x = torch.randn(3, 7, 24)
    alone = torch.cat([module(x[s, :n]) for s, n in enumerate(sizes)])
    padded = module(x, lengths=lengths)
    packed = module(packing.pack(x, lengths), cu_seqlens=cu)
    assert_close(packing.pack(padded, lengths), alone)
    assert_close(packed, alone)
    for layout in LAYOUTS:
        nested_x = torch.nested.nested_tensor([x[s, :n] for s, n in enumerate(sizes)], layout=layout)
        assert_close(torch.cat(module(nested_x).unbind()), alone)
    with_nan = x.clone()
    with_nan[0, 5:] = with_nan[1, 2:] = torch.nan
    real = packing.pack(module(with_nan, lengths=lengths), lengths)
    assert real.isfinite().all()


def test_packed_cross_attention() -> None:
    module = regard.nn.CrossAttention(24, heads=4, kv_model=10)
    xs, contexts = [torch.randn(n, 24) for n in (5, 2)], [torch.randn(n, 10) for n in (3, 6)]
    expected = torch.cat([module(x, c) for x, c in zip(xs, contexts, strict=True)])
    out = module(
        torch.cat(xs), torch.cat(contexts), cu_seqlens=packing.cu_seqlens([5, 2]),
        context_cu_seqlens=packing.cu_seqlens([3, 6]),
    )  # fmt: skip
    assert_close(out, expected)
    for layout in LAYOUTS:
        nest = [torch.nested.nested_tensor(sequences, layout=layout) for sequences in (xs, contexts)]
        assert_close(torch.cat(module(*nest).unbind()), expected)


def test_masks_of_module_and_call_combine() -> None:
    module, x = Attention(24, 4, mask=M.Causal()), torch.randn(2, 7, 24)
    keep = torch.rand(7, 7) > 0.5
    other = copy.deepcopy(module)
    other.mask = M.Causal() & M.Dense(keep)
    assert torch.equal(module(x, mask=keep), other(x))
    assert torch.equal(module(x, mask=M.Window(2, 0)), Attention.forward(module, x, mask=M.Window(2, 0)))


@pytest.mark.parametrize("kind", ["attention", "grouped", "latent", "block"])
def test_three_dims_of_a_mask_are_samples(kind: str) -> None:
    heads = samples = 4  # the sizes with which a mask for samples would pass for a mask for heads
    latent = {"rank": 8, "nope_dim": 4, "rope_dim": 2}
    module: Any = {
        "attention": lambda: Attention(24, heads, mask=M.Prefix(6)),
        "grouped": lambda: Attention(24, heads, kv_heads=2),
        "latent": lambda: regard.nn.LatentAttention(24, heads, **latent),
        "block": lambda: regard.nn.EncoderBlock(24, heads),
    }[kind]()
    x, keep = torch.randn(samples, 7, 24), torch.rand(samples, 7, 7) > 0.4
    expected = torch.cat([module(x[b : b + 1], mask=keep[b]) for b in range(samples)])
    assert_close(module(x, mask=keep), expected)
    assert_close(module(x, mask=keep[:, None]), expected)
    with pytest.raises(ValueError, match=r"mask\[:, None\] .* mask\[None\]"):
        module(x, mask=M.Dense(keep))
    with pytest.raises(ValueError, match="expected"):
        module(x[0], mask=keep)
    by_head = module(x, mask=keep[None])
    assert_close(module(x[0], mask=M.Dense(keep)), by_head[0])
    assert_close(module(x, mask=torch.arange(7) < 5), module(x, mask=M.Prefix(5)))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["attention", "latent"])
def test_three_dims_of_a_mask_are_samples_with_a_cache(kind: str) -> None:
    sizes = {"rank": 8, "nope_dim": 4, "rope_dim": 2}
    module: Any = Attention(24, 4) if kind == "attention" else regard.nn.LatentAttention(24, 4, **sizes)
    x, keep = torch.randn(4, 7, 24), torch.rand(4, 2, 7) > 0.4
    keep[..., 0] = True
    caches = [module.new_cache(n) for n in (4, 1, 1, 1, 1)]
    module(x[:, :5], cache=caches[0])
    alone = []
    for b, cache in enumerate(caches[1:]):
        module(x[b : b + 1, :5], cache=cache)
        alone.append(module(x[b : b + 1, 5:], cache=cache, mask=keep[b]))
    assert_close(module(x[:, 5:], cache=caches[0], mask=keep), torch.cat(alone))


def test_forward_hooks_receive_the_projection() -> None:
    module, x = Attention(24, 4, position=Rotary(6)), torch.randn(2, 5, 24)
    outputs: list[Tensor] = []
    with torch.no_grad():
        expected = module(x)
        module.qkv.register_forward_hook(lambda _, __, out: outputs.append(out))
        assert_close(module(x), expected)
        assert torch.equal(outputs[0], linear(x, module.qkv.weight, module.qkv.bias))
    assert_close(module(x), expected)


@pytest.mark.parametrize("rule", RULES)
def test_decoding_with_a_cache(rule: str) -> None:
    module = randomized(Attention(24, 4, kv_heads=2, position=RULES[rule](), mask=M.Window(4, 0), softcap=9.0,
                                  sink=True)).eval()  # fmt: skip
    x = torch.randn(2, 9, 24)
    cache = ListCache(torch.zeros(2, dtype=torch.int64))
    with torch.no_grad():
        steps = [module(chunk, cache=cache) for chunk in x.split((4, 1, 3, 1), 1)]
        assert_close(torch.cat(steps, 1), module(x))


def test_new_cache() -> None:
    module = Attention(24, 4, kv_heads=2, value_dim=5, mask=M.Causal(), dtype=torch.float64).eval()
    x = torch.randn(3, 6, 24, dtype=torch.float64)
    cache = module.new_cache(3, capacity=6)
    assert cache.nbytes == 3 * 6 * 2 * (6 + 5) * 8
    with torch.no_grad():
        steps = [module(chunk, cache=cache) for chunk in x.split((4, 1, 1), 1)]
        assert_close(torch.cat(steps, 1), module(x))
    with pytest.raises(ValueError, match="new_cache: expected self-attention, got kv_model = 10"):
        regard.nn.CrossAttention(24, heads=4, kv_model=10).new_cache(3)


@pytest.mark.parametrize("rule", RULES)
def test_arguments_reproduce_the_call(rule: str) -> None:
    module_options = {
        "kv_heads": 2,
        "position": RULES[rule](),
        "mask": M.Causal(),
        "sink": True,
        "softcap": 3.0,
    }
    module, x = randomized(Attention(24, 4, scale=0.7, **module_options)), torch.randn(2, 5, 24)
    qkv, options = module.arguments(x)
    out = regard.attention(*qkv, **options).transpose(1, 2).flatten(2)
    assert_close(module.out(out), module(x))


def test_positions_after_caches_of_different_length() -> None:
    module = Attention(24, 4, position=Rotary(6), mask=M.Causal())
    queries: list[Tensor] = []

    class Spy(ListCache):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            queries.append(q)
            return super().attend(q, k, v, **options)

    x = torch.randn(2, 3, 24)
    module(x, cache=Spy(torch.tensor([5, 9])))
    q = module.qkv(x)[..., :24].unflatten(-1, (4, 6)).transpose(1, 2)
    for s, start in enumerate((5, 9)):
        assert_close(queries[0][s], Rotary(6)(q[s], start))


def test_cache_with_dropout_raises() -> None:
    module = Attention(24, 4, dropout=0.1)
    with pytest.raises(ValueError, match="cache: expected None in training with dropout"):
        module(torch.randn(2, 3, 24), cache=ListCache(torch.zeros(2, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(25, 4), "d_model: expected a multiple of heads = 4, or head_dim"),
        (lambda: Attention(24, 4, kv_heads=3), "kv_heads: expected a divisor of heads = 4, got 3"),
        (lambda: Attention(24, 4, head_dim=0), "head_dim: expected an integer from 1"),
        (lambda: Attention(24, 4, dropout=-0.1), "dropout: expected a probability"),
        (
            lambda: Attention(24, 4, dropout="some"),
            "dropout: expected a number, got str 'some'",
        ),
        (lambda: Attention(24, 4, mask="causal"), "mask: expected a Mask, such as masks.Causal"),
        (lambda: Attention(24, 4)(None), "x: expected a tensor, got NoneType None"),
        (lambda: Attention(24, 4)(torch.randn(3, 24), [1]), "context: expected a tensor, got list"),
        (
            lambda: Attention(24, 4)(torch.randn(3, 24), Memory(*(torch.randn(4, 5, D) for D in (6, 7)))),
            r"context: expected a Memory of \(..., Hkv, Lk, Dv\) with \(4, 6\)",
        ),
        (
            lambda: Attention(24, 4)(torch.randn(2, 3, 24), cache={}),
            "cache: expected a cache of keys and values",
        ),
        (
            lambda: Attention(24, 4)(torch.randn(2, 3, 24), cache=LinearCache(2, 4, 6)),
            "cache: expected a cache of keys and values",
        ),
        (lambda: Attention(24, 4).arguments(torch.randn(3, 23)), "x: expected .*d_model = 24"),
        (lambda: Attention(24, 4, kv_model=9).arguments(torch.randn(3, 24)), "context: expected tokens"),
        (
            lambda: Attention(24, 4, position=Rotary(6))(
                torch.randn(2, 3, 24), positions=torch.zeros(3, 3, dtype=torch.long)
            ),
            "positions: expected leading dims broadcastable to x .*, got",
        ),
        (lambda: Attention(24, 4, position=Rotary(8)), "position: expected dims up to head_dim = 6, got 8"),
        (lambda: Attention(24, 4, position=AlibiBias(3)), "position: expected heads = 4, got 3"),
        (lambda: Attention(24, 4, position="rope"), "position: expected Rotary, AlibiBias or Relative"),
        (lambda: Attention(24, 4)(torch.randn(2, 3, 23)), "x: expected .*d_model = 24"),
        (lambda: Attention(24, 4)(torch.randn(3, 24), positions=3), "positions: expected None without"),
        (lambda: Attention(24, 4, kv_model=9)(torch.randn(3, 24)), "context: expected tokens of width"),
        (
            lambda: Attention(24, 4, kv_model=9)(torch.randn(3, 24), torch.randn(3, 8)),
            r"context: expected \(..., Lk, 9\)",
        ),
        (
            lambda: Attention(24, 4, position=Rotary(6))(torch.randn(3, 24), torch.randn(3, 24)),
            "context: expected None with position, which is for self-attention",
        ),
        (
            lambda: Attention(24, 4)(torch.randn(2, 3, 24), torch.randn(2, 3, 24), lengths=torch.ones(2)),
            "lengths: expected None with a context",
        ),
        (
            lambda: Attention(24, 4)(torch.randn(2, 5, 24), cu_seqlens=packing.cu_seqlens([2, 3])),
            r"x: expected packed tokens \(total, d_model\) with cu_seqlens",
        ),
        (
            lambda: Attention(24, 4)(torch.randn(5, 24), cu_seqlens=packing.cu_seqlens([2, 3]), cache=[]),
            "cache: expected None with cu_seqlens",
        ),
        (
            lambda: Attention(24, 4)(
                torch.randn(5, 24), torch.randn(5, 24), cu_seqlens=packing.cu_seqlens([5])
            ),
            r"context_cu_seqlens: expected \(N \+ 1,\) with cu_seqlens and a context, got None",
        ),
        (
            lambda: Attention(24, 4)(torch.randn(5, 24), context_cu_seqlens=packing.cu_seqlens([5])),
            "context_cu_seqlens: expected None without a context",
        ),
        (
            lambda: Attention(24, 4, position=Rotary(6))(
                torch.randn(7, 24), cu_seqlens=packing.cu_seqlens([2, 3])
            ),
            "cu_seqlens: expected the last entry 7, the tokens of x, got 5",
        ),
        (
            lambda: Attention(24, 4).eval()(torch.randn(3, 24), cache=Attention(24, 4).new_cache(1)),
            r"x: expected \(B, L, d_model\) with a cache, got float32 tensor of shape \(3, 24\)",
        ),
        (
            lambda: Attention(24, 4).eval()(torch.randn(1, 3, 24), cache=LatentCache(1, 8, 4)),
            "cache: expected a cache of keys and values.*LatentCache",
        ),
        (
            lambda: regard.nn.CrossAttention(24, heads=4, kv_model=9).remember(torch.randn(3, 24)),
            r"context: expected \(..., Lk, 9\)",
        ),
        (
            lambda: Attention(24, 4, mask=M.Causal())(torch.randn(3, 24), mask=[True]),
            "mask: expected a Mask or a bool tensor",
        ),
        (
            lambda: Attention(24, 4)(nested([3, 4], torch.jagged)[0], lengths=torch.ones(2)),
            "lengths: expected None with nested tensors",
        ),
    ],
)
def test_wrong_attention(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


SMALL_RULES: dict[str, Any] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(4),
    "interleaved": lambda: Rotary(2, layout="interleaved"),
    "alibi": lambda: AlibiBias(2, learned=True),
    "relative": lambda: Relative(2, num_buckets=4, max_distance=9),
}


@pytest.mark.parametrize("rule", SMALL_RULES)
def test_gradients_of_attention(rule: str) -> None:
    options = {"head_dim": 4, "position": SMALL_RULES[rule](), "mask": M.Causal(), "sink": True, "gate": True}
    module = randomized(Attention(6, 2, kv_heads=1, **options), 0.5).double()
    names = [name for name, _ in module.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    leaves = [p.detach().clone().requires_grad_() for p in module.parameters()]
    assert gradcheck(call, (x, *leaves), fast_mode=True)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("kind", ["multihead", "masked", "extra keys", "attention", "masks of regard"])
def test_modules_compile_in_one_graph(fresh_compiler: None, kind: str) -> None:
    x = torch.randn(2, 9, 24, requires_grad=True)
    if kind == "attention":
        module: Any = Attention(24, 4, kv_heads=2, position=Rotary(6), mask=M.Causal(), qk_norm=nn.RMSNorm)
        call = module
    else:
        extra_keys = kind == "extra keys"
        module = MultiheadAttention(24, 4, batch_first=True, add_bias_kv=extra_keys, add_zero_attn=extra_keys)
        options = {
            "masked": {
                "attn_mask": torch.rand(9, 9) > 0.8,
                "key_padding_mask": torch.arange(9) >= torch.tensor([[9], [4]]),
            },
            "masks of regard": {"attn_mask": M.Causal(), "need_weights": False, "is_causal": True},
        }.get(kind, {"need_weights": extra_keys, "is_causal": True})

        def call(x: Tensor) -> Tensor:
            out: Tensor = module(x, x, x, **options)[0]
            return out

    out, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x)
    assert_close(out, expected)
    parameters = [x, *module.parameters()]
    grads = [torch.autograd.grad(y.square().sum(), parameters, retain_graph=True) for y in (out, expected)]
    for grad, expected_grad in zip(*grads, strict=True):
        assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
