"""Tests of additive attention against the formula in float64, and of its memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from regard import masks as M
from regard._autograd import additive as operators
from regard._backends.torch import additive as tiles
from regard._call.additive import check
from regard.cost import peak_memory
from regard.nn import AdditiveAttention, Block, FeedForward, Memory, PostNorm, PreNorm
from support import assert_close, rel_l2
from support.modules import randomized
from support.tracing import check_traced

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec. is deprecated:FutureWarning"),
]
B, Lq, Lk = 3, 5, 7
WIDTHS = {"d_model": 6, "hidden": 11, "kv_model": 4, "value_model": 3}
SIZES = (1, 3, 17, 63, 65, 97, 129)


def make(**options: Any) -> AdditiveAttention:
    layer: AdditiveAttention = randomized(AdditiveAttention(**WIDTHS | options), 0.7).double()
    return layer


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def three(L: int = Lq, K: int = Lk, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, context and value of the layer of `make`."""
    return tokens(batch, L, 6), tokens(batch, K, 4), tokens(batch, K, 3)


def formula(
    layer: AdditiveAttention, x: Tensor, context: Tensor, value: Tensor, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns output and weights (B, Lq, Lk) by the formula. `allowed` is bool (..., Lq, Lk)."""
    hidden = (x @ layer.q.weight.mT)[:, :, None] + (context @ layer.k.weight.mT)[:, None]
    scores = torch.tanh(hidden if layer.q.bias is None else hidden + layer.q.bias) @ layer.score
    if allowed is None:
        weights = scores.softmax(-1)
    else:
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0)
    return weights @ value, weights


# The formula


@pytest.mark.parametrize("L", SIZES)
@pytest.mark.parametrize("K", SIZES)
def test_output_weights_and_gradients_match_the_formula(L: int, K: int) -> None:
    layer, inputs = make(), [t.requires_grad_() for t in three(L, K, 2)]
    out, w = layer(*inputs, return_weights=True)
    expected, weights = formula(layer, *inputs)
    assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert_close(w, weights[:, None], rtol=1e-12, atol=1e-12)
    leaves, dout, dw = [*inputs, *layer.parameters()], torch.randn_like(out), torch.randn_like(w)
    grads = torch.autograd.grad([out, w], leaves, [dout, dw])
    by_formula = torch.autograd.grad([expected, weights], leaves, [dout, dw[:, 0]])
    for grad, expected_grad in zip(grads, by_formula, strict=True):
        assert_close(grad, expected_grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("elements", [1, 50, 400, 3000])
def test_results_do_not_depend_on_the_tiles(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs = make(mask=M.Causal(), dropout=0.3), [t.requires_grad_() for t in three()]
    keep = torch.rand(B, Lq, Lk) > 0.3

    def results() -> list[Tensor]:
        torch.manual_seed(1)
        out, w = layer(*inputs, mask=keep, return_weights=True)
        return [out, w, *torch.autograd.grad([out, w], inputs, [torch.ones_like(out), w.detach() * 2])]

    expected = results()
    monkeypatch.setattr(tiles, "ELEMENTS", elements)
    for result, whole in zip(results(), expected, strict=True):
        assert_close(result, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    exact = make()
    layer, inputs = copy.deepcopy(exact).to(dtype), [t.to(dtype).requires_grad_() for t in three(17, 65)]
    exact.load_state_dict({name: p.double() for name, p in layer.state_dict().items()})
    out, w = layer(*inputs, return_weights=True)
    assert out.dtype == w.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected, weights = formula(exact, *wide)
    limit = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert rel_l2(out, expected) < limit
    assert rel_l2(w[:, 0], weights) < limit
    grads = torch.autograd.grad(out.float().square().sum(), [*inputs, *layer.parameters()])
    by_formula = torch.autograd.grad(expected.square().sum(), [*wide, *exact.parameters()])
    for grad, leaf, expected_grad in zip(grads, [*inputs, *layer.parameters()], by_formula, strict=True):
        assert grad.dtype == leaf.dtype
        assert rel_l2(grad, expected_grad) < 3 * limit


def test_strides() -> None:
    layer, (x, context, value) = make(), three()
    expected = layer(x, context, value)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, context, value)]
    assert_close(layer(*turned), expected)
    channels = [torch.stack((t, torch.full_like(t, torch.nan)), -1)[..., 0] for t in (x, context, value)]
    assert channels[0].stride(-1) == 2
    assert_close(layer(*channels), expected)
    backwards = [t.flip(1).clone().flip(1) for t in (x, context, value)]
    assert_close(layer(*backwards), expected)
    assert_close(layer(x[:1].expand(B, -1, -1), context, value)[0], expected[0])


def test_widths_and_parameters() -> None:
    layer = AdditiveAttention(6)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "score": (6,),
        "q.weight": (6, 6),
        "q.bias": (6,),
        "k.weight": (6, 6),
    }
    assert layer(torch.randn(B, Lq, 6)).shape == (B, Lq, 6)
    assert "q.bias" not in dict(AdditiveAttention(6, bias=False).named_parameters())
    assert make()(*three()).shape == (B, Lq, 3)
    cross = AdditiveAttention(6, kv_model=4)
    assert cross(torch.randn(B, Lq, 6), torch.randn(B, Lk, 4)).shape == (B, Lq, 4)
    assert repr(AdditiveAttention(6, kv_model=4)).startswith(
        "AdditiveAttention(\n  d_model=6, hidden=6, kv_model=4, dropout=0"
    )


def test_every_parameter_gets_a_gradient() -> None:
    layer = make()
    layer(*three()).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.all(), name


def test_self_attention_and_cross_attention() -> None:
    layer, x = randomized(AdditiveAttention(6, hidden=5)).double(), tokens(B, Lq, 6)
    assert_close(layer(x), formula(layer, x, x, x)[0])
    assert torch.equal(layer(x, x), layer(x))
    context = tokens(B, Lk, 6)
    assert_close(layer(x, context), formula(layer, x, context, context)[0])


def test_unbatched() -> None:
    layer, (x, context, value) = make(), three()
    out, w = layer(x, context, value, return_weights=True)
    one, of_one = layer(x[1], context[1], value[1], return_weights=True)
    assert_close(one, out[1])
    assert_close(of_one, w[1])


def test_remembered_keys() -> None:
    """A decoder projects the source once, and then takes one step for each target token."""
    layer, (x, context, value) = make(), three()
    lengths = torch.tensor([7, 2, 4])
    memory = layer.remember(context, value)
    assert isinstance(memory, Memory)
    assert [tuple(t.shape) for t in memory] == [(B, 1, Lk, 11), (B, 1, Lk, 3)]
    steps = [layer(token, memory, lengths=lengths) for token in x.split(1, 1)]
    assert_close(torch.cat(steps, 1), layer(x, context, value, lengths=lengths))


def test_attend_is_the_layer_without_projections() -> None:
    layer, (x, context, value) = make(), three()
    q, k = layer.q(x)[:, None], layer.k(context)[:, None]
    assert_close(layer.attend(q, k, value[:, None])[:, 0], layer(x, context, value))
    one_row = layer.attend(q, k, value[:, None], mask=M.Window(0, 0))[:, 0]
    assert_close(one_row, value[:, Lk - Lq :])


@pytest.mark.parametrize("heads", [(3, 3), (3, 1), (1, 1)])
def test_attend_takes_one_head_of_hidden_channels(heads: tuple[int, int]) -> None:
    layer, D = AdditiveAttention(8, hidden=4), 6 if heads == (1, 1) else 4
    q, k = torch.randn(2, heads[0], 5, D), torch.randn(2, heads[1], 6, D)
    with pytest.raises(ValueError, match=r"q: expected \(\.\.\., 1, L, hidden = 4\), one head, got"):
        layer.attend(q, k, k)


# Masks, padding, NaN

MASKS: dict[str, Any] = {
    "causal": M.Causal(),
    "window": M.Window(1, 1),
    "lengths": M.Lengths(torch.tensor([7, 1, 4])),
    "union": M.Prefix(2) | ~M.Causal(),
    "dense": M.Dense(torch.rand(B, 1, Lq, Lk, generator=torch.Generator().manual_seed(1)) < 0.6),
    "documents": M.Documents(torch.arange(Lk) // 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask, inputs = MASKS[name], three()
    layer = make(mask=mask)
    allowed = mask.to_dense(Lq, Lk)
    allowed = allowed[:, 0] if allowed.dim() == 4 else allowed
    out, w = layer(*inputs, return_weights=True)
    expected, weights = formula(layer, *inputs, allowed)
    assert_close(out, expected)
    assert_close(w[:, 0], weights)
    assert (w[:, 0].masked_select(~allowed) == 0).all()
    assert_close(make_like(layer)(*inputs, mask=mask), expected)


def make_like(layer: AdditiveAttention) -> AdditiveAttention:
    """Returns a layer with the same weights and without a mask."""
    other = make()
    other.load_state_dict(layer.state_dict())
    return other


def test_mask_tensors() -> None:
    """True = may attend, in each of the three shapes."""
    layer, inputs = make(), three()
    for keep in (torch.rand(Lq, Lk) < 0.6, torch.rand(B, Lq, Lk) < 0.6):
        assert_close(layer(*inputs, mask=keep), formula(layer, *inputs, keep)[0])
        four = keep.expand(B, Lq, Lk)[:, None]
        assert_close(layer(*inputs, mask=four), layer(*inputs, mask=keep))


def test_the_masks_of_layer_call_and_lengths_apply_together() -> None:
    layer, inputs, keep = make(mask=M.Causal()), three(), torch.rand(B, Lq, Lk) < 0.7
    lengths = torch.tensor([7, 3, 5])
    allowed = keep & M.Causal().to_dense(Lq, Lk) & (torch.arange(Lk) < lengths[:, None, None])
    out = layer(*inputs, mask=keep, lengths=lengths)
    assert_close(out, formula(layer, *inputs, allowed)[0])


def test_padding_matches_shorter_sequences() -> None:
    layer, (x, context, value) = make(), three()
    out = layer(x, context, value, lengths=torch.tensor([7, 1, 4]))
    for n, length in enumerate((7, 1, 4)):
        assert_close(out[n], layer(x[n], context[n, :length], value[n, :length]))


def test_fully_masked_rows_are_zero() -> None:
    layer, inputs = make(), [t.requires_grad_() for t in three()]
    keep = torch.ones(B, Lq, Lk, dtype=torch.bool)
    keep[1, 2] = False
    out, w = layer(*inputs, mask=keep, return_weights=True)
    assert not out[1, 2].any()
    assert not w[1, 0, 2].any()
    grads = torch.autograd.grad(out[1, 2].sum(), inputs)
    assert all(not grad.any() for grad in grads)
    assert not layer(*inputs, lengths=torch.zeros(B, dtype=torch.int64)).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", ["lengths", "mask", "tensor"])
@pytest.mark.parametrize("self_attention", [False, True])
def test_padding_that_is_not_finite_reaches_nothing(bad: float, form: str, self_attention: bool) -> None:
    """Outputs and all gradients are those without padding, also the gradients of parameters."""
    lengths = torch.tensor([7, 1, 4])
    real = torch.arange(Lk) < lengths[:, None]
    options = {
        "lengths": {"lengths": lengths},
        "mask": {"mask": M.Lengths(lengths)},
        "tensor": {"mask": real[:, None].expand(B, Lk if self_attention else Lq, Lk)},
    }[form]
    layer = randomized(AdditiveAttention(4, hidden=5)).double() if self_attention else make()
    inputs = (tokens(B, Lk, 4),) if self_attention else three()

    def results(fill: float) -> list[Tensor]:
        padded = [t.clone() for t in inputs]
        for t in padded if self_attention else padded[1:]:
            t[~real] = fill
        leaves = [t.requires_grad_() for t in padded]
        out, w = layer(*leaves, return_weights=True, **options)
        out, w = (out[real], w[:, 0][real]) if self_attention else (out, w)
        return [
            out,
            w,
            *torch.autograd.grad(out.square().sum() + w.square().sum(), [*leaves, *layer.parameters()]),
        ]

    for result, expected in zip(results(bad), results(0.5), strict=True):
        assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_nan_beyond_the_valid_edge_of_a_causal_mask() -> None:
    """Token 4 is NaN. Queries 0 to 3 may not attend to it, queries from 4 on may."""
    layer, x = randomized(AdditiveAttention(6, mask=M.Causal())).double(), tokens(B, Lq, 6)
    expected = layer(x)
    x[:, 4] = torch.nan
    out, w = layer(x.requires_grad_(), return_weights=True)
    assert_close(out[:, :4], expected[:, :4])
    assert out[:, 4:].isnan().all()
    assert w[:, :, 4:].isnan().all()
    for grad in torch.autograd.grad(out[:, :4].sum(), [x, *layer.parameters()]):
        assert grad.isfinite().all()


def test_a_nan_that_may_be_attended_to_is_visible() -> None:
    layer, (x, context, value) = make(), three()
    value[1, 2] = torch.nan
    out = layer(x, context, value)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    x[0, 3] = torch.nan
    out = layer(x, context, value)
    assert out[0, 3].isnan().all()
    assert out[0, :3].isfinite().all()


@pytest.mark.parametrize("sizes", [(0, Lk, B), (Lq, 0, B), (Lq, Lk, 0)])
def test_empty_sizes(sizes: tuple[int, int, int]) -> None:
    layer, inputs = make(), [t.requires_grad_() for t in three(*sizes)]
    out, w = layer(*inputs, return_weights=True)
    assert out.shape == (sizes[2], sizes[0], 3)
    assert w.shape == (sizes[2], 1, sizes[0], sizes[1])
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), [*inputs, *layer.parameters()]):
        assert not grad.any()


# Dropout


def test_dropout() -> None:
    layer, inputs = make(dropout=0.25), three(3, 4000, 1)
    out, w = layer(*inputs, return_weights=True)
    assert_close(w.sum(-1), torch.ones(1, 1, 3))  # the weights before dropout
    assert not torch.equal(layer(*inputs), out)
    assert torch.equal(layer.eval()(*inputs), layer(*inputs))
    ones = inputs[0], inputs[1], torch.ones(1, 4000, 3, dtype=torch.float64)
    kept = torch.stack([layer.train()(*ones).detach() for _ in range(30)])
    assert abs(float(kept.mean()) - 1) < 0.01
    assert not make(dropout=1.0)(*inputs).any()


def test_dropout_has_the_gradients_of_its_pattern() -> None:
    layer, inputs = make(dropout=0.5, hidden=3), [t.requires_grad_() for t in three(3, 4, 2)]

    def seeded(*leaves: Tensor) -> Tensor:
        torch.manual_seed(3)
        out: Tensor = layer(*leaves)
        return out

    assert gradcheck(seeded, inputs)
    assert gradgradcheck(seeded, inputs)


# Derivatives, transforms, tracing


@pytest.mark.parametrize("name", ["none", "causal", "dense"])
def test_gradcheck(name: str) -> None:
    mask = {"causal": M.Causal(), "dense": M.Dense(torch.rand(2, 1, 3, 4) < 0.6)}.get(name)
    layer, inputs = make(mask=mask, hidden=3), [t.requires_grad_() for t in three(3, 4, 2)]
    leaves = [*inputs, *layer.parameters()]

    def call(*leaves: Tensor) -> Any:
        named = dict(zip((n for n, _ in layer.named_parameters()), leaves[3:], strict=True))
        return torch.func.functional_call(layer, named, leaves[:3], {"return_weights": True})

    assert gradcheck(call, leaves, check_forward_ad=True)
    assert gradgradcheck(call, leaves)


def test_gradients_of_the_weights_alone() -> None:
    layer, inputs = make(), [t.requires_grad_() for t in three()]
    w = layer(*inputs, return_weights=True)[1]
    expected = formula(layer, *inputs)[1]
    dw = torch.randn_like(expected)
    grads = torch.autograd.grad(w, inputs[:2], dw[:, None])
    for grad, by_formula in zip(grads, torch.autograd.grad(expected, inputs[:2], dw), strict=True):
        assert_close(grad, by_formula)


@pytest.mark.parametrize("name", ["none", "causal"])
def test_traced(name: str) -> None:
    layer, inputs = make(mask=MASKS.get(name)), three()
    check_traced(lambda *args: layer(*args, return_weights=True), list(inputs))


def test_compiled_training_with_lengths() -> None:
    layer, lengths = make(), torch.tensor([7, 1, 4])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in ((Lq, Lk), (Lq + 2, Lk + 1)):
        inputs = [t.requires_grad_() for t in three(*sizes)]
        out, expected = (f(*inputs, lengths=lengths) for f in (compiled, layer))
        assert_close(out, expected)
        pairs = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, expected))
        for grad, expected_grad in zip(*pairs, strict=True):
            assert_close(grad, expected_grad)


def test_operators_pass_opcheck() -> None:
    x, context, value = three()
    layer = make()
    qkv = layer.q(x)[:, None], layer.k(context)[:, None], value[:, None]
    args, _ = check(qkv, layer.score, MASKS["lengths"] & M.Causal(), 0.0, True)
    leaves = [t.detach().requires_grad_() for t in args[:4]]
    torch.library.opcheck(operators.additive_forward, (*leaves, *args[4:]))
    dout, dw = torch.randn(B, 1, Lq, 3).double(), torch.randn(B, 1, Lq, Lk).double()
    backward = *(t.detach() for t in leaves), *args[4:], dout, dw
    torch.library.opcheck(operators.additive_backward, backward)


def test_transforms_of_torch_func() -> None:
    layer, inputs = make(), three()

    def loss(x: Tensor, context: Tensor, value: Tensor) -> Tensor:
        total: Tensor = layer(x, context, value, mask=M.Causal()).square().sum()
        return total

    per_sample = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*inputs)
    leaves = [t.requires_grad_() for t in inputs]
    for grad, expected in zip(per_sample, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert_close(grad, expected)
    x, *others = (t[0, :3].detach() for t in inputs)
    hessian = torch.func.hessian(loss)(x, *others)
    assert_close(hessian, torch.autograd.functional.hessian(lambda t: loss(t, *others), x))


def test_legacy_batched_gradients_raise() -> None:
    layer, inputs = make(), [t.requires_grad_() for t in three()]
    out = layer(*inputs)
    with pytest.raises(NotImplementedError, match="is_grads_batched=True"):
        torch.autograd.grad(out, inputs, torch.ones(2, *out.shape), is_grads_batched=True)


def test_autocast() -> None:
    layer = make().float()
    inputs = [t.float().requires_grad_() for t in three()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(*inputs)
        assert out.dtype is torch.bfloat16
        loss = out.float().sum()
    assert rel_l2(out, layer(*inputs)) < 2e-2
    for grad in torch.autograd.grad(loss, [*inputs, *layer.parameters()]):
        assert grad.dtype is torch.float32
        assert grad.isfinite().all()


def test_meta_device() -> None:
    layer = AdditiveAttention(**WIDTHS, device="meta", mask=M.Causal())
    inputs = [t.to("meta").float() for t in three()]
    out, w = layer(*inputs, lengths=torch.tensor([7, 1, 4]), return_weights=True)
    assert out.is_meta
    assert out.shape == (B, Lq, 3)
    assert w.shape == (B, 1, Lq, Lk)


def test_checkpointing_and_flops() -> None:
    layer, inputs = make(), [t.requires_grad_() for t in three()]
    again = checkpoint(layer, *inputs, use_reentrant=False)
    pairs = (torch.autograd.grad(y.square().sum(), inputs) for y in (again, layer(*inputs)))
    for grad, expected in zip(*pairs, strict=True):
        assert_close(grad, expected)
    with FlopCounterMode(display=False) as counter:
        layer(*inputs).sum()
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.regard.additive_forward] == 2 * B * Lq * Lk * (11 + 3)


# Blocks and residuals


@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
def test_in_residuals_and_blocks(residual: Any) -> None:
    layer, x = residual(6, AdditiveAttention(6, hidden=5)).double(), tokens(B, Lq, 6)
    out, w = layer(x, return_weights=True)
    assert torch.equal(out, layer(x))
    assert w.shape == (B, 1, Lq, Lq)
    cross = AdditiveAttention(6, kv_model=4, value_model=6)
    block = Block(AdditiveAttention(6), FeedForward(6), cross=cross, residual=residual).double()
    context = tokens(B, Lk, 4), tokens(B, Lk, 6)
    memory = cross.remember(*context)
    mask, options = M.Lengths(torch.tensor([7, 1, 4])), {"lengths": torch.tensor([5, 2, 3])}
    out, w, of_cross = block(x, memory, return_weights=True, context_mask=mask, **options)
    assert torch.equal(out, block(x, memory, context_mask=mask, **options))
    assert w.shape == (B, 1, Lq, Lq)
    assert not w[1, ..., 2:].any()
    assert of_cross.shape == (B, 1, Lq, Lk)
    assert not of_cross[1, ..., 1:].any()


# Memory


def test_memory_is_linear() -> None:
    """Training takes less memory than (Lq, Lk), which is 1/32 of (Lq, Lk, hidden) here."""

    def peak(L: int) -> int | None:
        layer, x = AdditiveAttention(32), torch.randn(1, L, 32, requires_grad=True)
        return peak_memory(lambda: layer(x).square().sum().backward())

    _, half, whole = (peak(L) for L in (64, 1024, 2048))
    if half is None or whole is None:
        pytest.skip("the system does not report memory")
    assert whole < 2048**2 * 4
    assert whole < 2.5 * half + 2**20


# Arguments


def test_sizes_by_position_raise() -> None:
    message = r"by name, got 8; write AdditiveAttention\(6, hidden=8\).*kv_model=8\) for a context"
    with pytest.raises(TypeError, match=message):
        AdditiveAttention(6, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 0}, "d_model: expected an integer from 1"),
        ({"hidden": 0}, "hidden: expected an integer from 1"),
        ({"hidden": 2.5}, "hidden: expected an int, got float"),
        ({"dropout": 1.5}, "dropout: expected a probability from 0 to 1, got 1.5"),
        (
            {"mask": torch.ones(3, 3)},
            r"mask: expected a Mask, such as masks.Causal\(\), or None, got float32",
        ),
        ({"heads": 2}, "heads: leave it out: additive attention has one head"),
        ({"num_hiddens": 2}, "num_hiddens: write hidden="),
        ({"hidden_size": 2}, "hidden_size: write d_model=, and hidden= for the hidden layer"),
        ({"kdim": 2}, "kdim: write kv_model="),
        ({"scale": 2}, "unexpected keyword argument 'scale'; it takes d_model, hidden, kv_model"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        AdditiveAttention(**WIDTHS | options)


def test_wrong_inputs() -> None:
    layer, (x, context, value) = make(), three()
    lengths = torch.tensor([7, 1, 4])
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x[..., :5], context, value), {}, r"x: expected \(..., L, d_model = 6\), got float64 tensor"),
        ((x, context[..., :3], value), {}, r"context: expected \(..., Lk, 4\)"),
        ((x, context, value[:, :5]), {}, r"value: expected \(3, 7, 3\), the tokens of context and width 3"),
        ((x, context), {}, "value: expected tokens of width value_model = 3, got None"),
        ((x,), {}, "context: expected tokens of width kv_model = 4, got None"),
        ((x, None, value), {}, "context: expected a tensor, the tokens of the keys, with `value`, got None"),
        ((x, Memory(x[:, None], x[:, None])), {}, r"context: expected a Memory of .* with \(1, 11\)"),
        ((x[0], context, value), {}, "k: expected 3 dims as in q, got 4"),
        ((x[:2], context, value), {}, "batch dims that are equal or 1, got 2, 3 and 3"),
        ((x, context, value), {"lengths": lengths[:2]}, r"lengths: expected integers \(B = 3,\)"),
        (
            (x, context, value),
            {"lengths": lengths + 1},
            "lengths: expected from 0 to L = 7, got values from 2",
        ),
        ((x[0], context[0], value[0]), {"lengths": lengths}, "lengths: expected None without a batch dim"),
        ((x, context, value), {"mask": torch.ones(Lq, Lk)}, "expected a bool tensor where True means"),
        ((x, context, value), {"mask": torch.ones(Lq, Lq).bool()}, "mask: expected"),
        ((x, context, value), {"attn_mask": None}, "attn_mask"),
    ]
    for inputs, options, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            layer(*inputs, **options)
    nested = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"x: expected .*, got a nested tensor"):
        layer(nested)


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("valid_lens", "valid_lens: write lengths="),
        ("cu_seqlens", "cu_seqlens: write lengths=, with padded sequences"),
        ("need_weights", "need_weights: write return_weights=True"),
        ("attn_mask", "attn_mask: write mask="),
        (
            "offset",
            r"unexpected keyword argument 'offset'; it takes x, context, value, mask, lengths, return_",
        ),
    ],
)
def test_keywords_of_other_libraries(keyword: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()(*three(), **{keyword: True})


def test_too_many_weights_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs = make(), three()
    monkeypatch.setattr("regard._api.attention.MAX_WEIGHTS", 10)
    layer(*inputs)
    with pytest.raises(ValueError, match="weights: expected at most"):
        layer(*inputs, return_weights=True)


def test_state_dict_is_checked_first() -> None:
    layer = make()
    state = layer.state_dict()
    del state["score"]
    with pytest.raises(RuntimeError, match="nothing was loaded; expected also score"):
        layer.load_state_dict(state)


def test_copies_are_independent() -> None:
    layer, inputs = make(), three()
    twin = copy.deepcopy(layer)
    nn.init.zeros_(twin.score)
    assert_close(twin(*inputs), inputs[2].mean(1, keepdim=True).expand(B, Lq, 3))
    assert not torch.equal(twin(*inputs), layer(*inputs))
