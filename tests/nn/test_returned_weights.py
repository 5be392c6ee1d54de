"""Tests `return_weights=True`: the weights of attention layers, residuals, blocks and stacks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard import masks as M, packing, see
from regard.cache import KVCache, QuantizedCache, SlidingCache
from regard.nn import (
    AdditiveAttention,
    Attention,
    Block,
    DecoderBlock,
    EncoderBlock,
    EncoderDecoder,
    FeedForward,
    Graph,
    GraphAttention,
    LatentAttention,
    LinearAttention,
    PostNorm,
    PreNorm,
    Stack,
)
from regard.positions import AlibiBias, Relative, Rotary
from support import HAVE_CORE, assert_close, rel_l2
from support.modules import ListCache, randomized
from support.tracing import check_traced

pytestmark = [
    pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]
B, L, D, HEADS = 3, 7, 24, 4

LAYERS: dict[str, Any] = {
    "plain": lambda: Attention(D, HEADS),
    "grouped": lambda: Attention(D, HEADS, kv_heads=2, head_dim=5, value_dim=7, sink=True, softcap=3.0),
    "rotary": lambda: Attention(D, HEADS, position=Rotary(4), mask=M.Causal(), qk_norm=nn.RMSNorm),
    "alibi": lambda: Attention(D, HEADS, position=AlibiBias(HEADS), mask=M.sliding(3), gate=True),
    "relative": lambda: Attention(
        D, HEADS, position=Relative(HEADS, num_buckets=8, max_distance=20), out=False
    ),
    "latent": lambda: LatentAttention(D, HEADS, rank=9, nope_dim=5, rope_dim=4, value_dim=7, mask=M.Causal()),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Any:
    return randomized(LAYERS[request.param]()).double()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, dtype=torch.float64)


def expected_weights(layer: Any, x: Tensor, **mask: Any) -> Tensor:
    qkv, options = layer.arguments(x)
    return regard.weights(*qkv, **options | mask)


def test_weights_are_those_of_the_call(layer: Any) -> None:
    x = tokens(B, L)
    out, w = layer(x, return_weights=True)
    assert w.shape == (B, HEADS, L, L)
    assert_close(w, expected_weights(layer, x))
    assert_close(out, layer(x))
    unbatched, of_sample = layer(x[1], return_weights=True)
    assert_close(of_sample, w[1])
    assert_close(unbatched, out[1])


def test_weights_reproduce_the_output() -> None:
    """Weights times values, joined and projected, are the output."""
    layer, x = randomized(Attention(D, HEADS, kv_heads=2, value_dim=5)).double(), tokens(B, L)
    out, w = layer(x, return_weights=True)
    v = layer.arguments(x)[0][2].repeat_interleave(2, 1)
    joined = (w @ v).transpose(1, 2).flatten(2)
    assert_close(out, layer.out(joined))


def test_weights_with_masks_and_lengths(layer: Any) -> None:
    x, keep = tokens(B, L), torch.rand(B, L, L) > 0.4
    lengths = torch.tensor([7, 3, 5])
    mask = layer.mask & M.Dense(keep[:, None]) if layer.mask is not None else M.Dense(keep[:, None])
    _, w = layer(x, mask=keep, return_weights=True)
    assert_close(w, expected_weights(layer, x, mask=mask))
    _, w = layer(x, lengths=lengths, return_weights=True)
    assert (w[1, ..., 3:] == 0).all()
    alone = layer(x[1, :3], return_weights=True)[1]
    assert_close(w[1, :, :3, :3], alone)


def test_weights_of_packed_and_nested_sequences(layer: Any) -> None:
    sizes = [5, 1, 7]
    xs = [tokens(n) for n in sizes]
    _, w = layer(torch.cat(xs), cu_seqlens=packing.cu_seqlens(sizes), return_weights=True)
    assert w.shape == (3, HEADS, 7, 7)
    for n, x, of_sequence in zip(sizes, xs, w, strict=True):
        assert_close(of_sequence[:, :n, :n], layer(x, return_weights=True)[1])
        assert not of_sequence[:, n:].any()
        assert not of_sequence[..., n:].any()
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor(xs, layout=layout)
        out, again = layer(nested, return_weights=True)
        assert_close(again, w)
        assert_close(torch.cat(out.unbind()), torch.cat([layer(x) for x in xs]))


def test_weights_of_packed_sequences_with_empty_ones() -> None:
    layer = randomized(regard.nn.CrossAttention(D, heads=HEADS, kv_model=10))
    cu, context_cu = packing.cu_seqlens([5, 0, 2]), packing.cu_seqlens([3, 4, 0])
    x, context = torch.randn(7, D), torch.randn(7, 10)
    _, w = layer(x, context, cu_seqlens=cu, context_cu_seqlens=context_cu, return_weights=True)
    assert w.shape == (3, HEADS, 5, 4)
    assert_close(w[0, :, :, :3], layer(x[:5], context[:3], return_weights=True)[1])
    assert not w[1:].any()


def test_weights_of_cross_attention_and_memory() -> None:
    layer = randomized(regard.nn.CrossAttention(D, heads=HEADS, kv_model=10))
    x, context = torch.randn(B, L, D), torch.randn(B, 5, 10)
    out, w = layer(x, context, return_weights=True)
    assert w.shape == (B, HEADS, L, 5)
    qkv, options = layer.arguments(x, context=context)
    assert_close(w, regard.weights(*qkv, **options))
    again, of_memory = layer(x, layer.remember(context), return_weights=True)
    assert torch.equal(of_memory, w)
    assert torch.equal(again, out)


CACHES: dict[str, Any] = {
    "dense": lambda: KVCache(B, HEADS, 6, dtype=torch.float64),
    "own": lambda: ListCache(torch.zeros(B, dtype=torch.int64)),
}


@pytest.mark.parametrize("cache", CACHES)
def test_weights_of_decode_steps(cache: str) -> None:
    layer, x = randomized(Attention(D, HEADS, position=Rotary(4), mask=M.Causal())).double(), tokens(B, L)
    expected_out, expected = layer(x, return_weights=True)
    stored, start = CACHES[cache](), 0
    with torch.no_grad():
        for part in x.split((4, 1, 1, 1), 1):
            out, w = layer(part, cache=stored, return_weights=True)
            stop = start + part.shape[1]
            assert_close(w, expected[:, :, start:stop, :stop])
            assert_close(out, expected_out[:, start:stop])
            start = stop


@pytest.mark.parametrize("absorb", [False, True, None])
def test_weights_of_latent_decode_steps(absorb: bool | None) -> None:
    layer, x = randomized(LAYERS["latent"]()).double(), tokens(B, L)
    _, expected = layer(x, return_weights=True, absorb=absorb)
    assert_close(expected, layer(x, return_weights=True)[1])
    cache = layer.new_cache(B)
    with torch.no_grad():
        _, prefill = layer(x[:, :4], cache=cache, absorb=absorb, return_weights=True)
        _, step = layer(x[:, 4:5], cache=cache, absorb=absorb, return_weights=True)
    assert_close(prefill, expected[:, :, :4, :4])
    assert_close(step, expected[:, :, 4:5, :5])


def test_too_many_weights_leave_the_cache_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Attention(D, HEADS, mask=M.Causal()), torch.randn(B, L, D)
    cache = layer.new_cache(B)
    with torch.no_grad():
        layer(x, cache=cache)
        monkeypatch.setattr("regard._api.attention.MAX_WEIGHTS", 10)
        with pytest.raises(ValueError, match="weights: expected at most"):
            layer(x[:, :1], cache=cache, return_weights=True)
    assert cache.lengths.tolist() == [L] * B


def test_weights_are_those_before_dropout_and_have_gradients() -> None:
    layer, x = randomized(Attention(D, HEADS, dropout=0.5)).double(), tokens(B, L).requires_grad_()
    _, w = layer(x, return_weights=True)
    assert_close(w, expected_weights(layer, x))
    (grad,) = torch.autograd.grad((w * torch.randn_like(w)).sum(), x)
    assert grad.isfinite().all()
    assert grad.any()


def test_hooks_run_once_and_recordings_see_one_call() -> None:
    layer, x, calls = Attention(D, HEADS), torch.randn(1, L, D), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    with see.capture(layer) as seen:
        layer(x, return_weights=True)
    assert len(calls) == 1
    assert len(seen) == 1


def test_a_layer_without_a_recorded_call_raises() -> None:
    class Own(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return (q @ k.mT).softmax(-1) @ v

    with pytest.raises(RuntimeError, match=r"call regard\.attention once, got 0"):
        Own(D, HEADS)(torch.randn(1, L, D), return_weights=True)


def test_compiled_layers_return_weights() -> None:
    layer, x = Attention(D, HEADS, mask=M.Causal()), torch.randn(B, L, D)
    out, w = torch.compile(layer, backend="eager")(x, return_weights=True)
    expected_out, expected = layer(x, return_weights=True)
    assert_close(w, expected)
    assert_close(out, expected_out)


def test_traced_layers_return_weights() -> None:
    """Export, vmap and fake tensors return weights. A compiler that may not break the graph says why."""
    layer, x = Attention(D, HEADS, mask=M.Causal()).eval(), torch.randn(B, L, D)
    expected = layer(x, return_weights=True)
    exported = torch.export.export(layer, (x,), {"return_weights": True}).module()(x, return_weights=True)
    for ours, theirs in zip(exported, expected, strict=True):
        assert_close(ours, theirs)
    mapped = torch.vmap(lambda x: layer(x, return_weights=True))(torch.stack([x, x]))
    for ours, theirs in zip(mapped, expected, strict=True):
        assert_close(ours[1], theirs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _, w = layer(mode.from_tensor(x), return_weights=True)
    assert w.shape == (B, HEADS, L, L)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"return_weights=True breaks the graph; arguments\(\) and regard"):
        torch.compile(layer, backend="eager", fullgraph=True)(x, return_weights=True)


def test_a_compiled_layer_gives_its_arguments_to_weights() -> None:
    layer = Attention(D, HEADS, mask=M.Causal(), position=Rotary(D // HEADS)).eval()

    def weights(x: Tensor) -> Tensor:
        qkv, options = layer.arguments(x)
        return regard.weights(*qkv, **options)

    check_traced(weights, [torch.randn(B, L, D)])


def test_traced_weights_keep_nan_in_the_rows_that_attend_to_it() -> None:
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    k[..., 2, :], q[..., 0, 3] = torch.nan, torch.inf

    def weights(q: Tensor, k: Tensor) -> Tensor:
        return regard.weights(q, k, k, mask=M.Causal())

    expected, leaf = weights(q, k), q.clone().requires_grad_()
    assert expected.isnan().any(-1).flatten().tolist() == [True, False, True, True]
    actual = torch.compile(weights, backend="eager", fullgraph=True)(leaf, k)
    torch.testing.assert_close(actual.detach(), expected, equal_nan=True)
    (ours,) = torch.autograd.grad(actual[..., 1, :].square().sum(), leaf)
    (theirs,) = torch.autograd.grad(weights(leaf, k)[..., 1, :].square().sum(), leaf)
    assert theirs[..., 1, :].isfinite().all()
    torch.testing.assert_close(ours[..., 1, :], theirs[..., 1, :])


# Residuals, blocks, stacks


@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
def test_residuals_return_the_weights_of_their_sublayer(residual: Any) -> None:
    layer = randomized(residual(D, Attention(D, HEADS)))
    x, y = torch.randn(B, L, D), torch.randn(B, 5, D)
    for inputs in ((x,), (x, y), (x, y, torch.randn(B, 5, D))):
        out, w = layer(*inputs, return_weights=True)
        assert torch.equal(out, layer(*inputs))
        first = layer.norm(x) if residual is PreNorm else x
        assert torch.equal(w, layer.sublayer(first, *inputs[1:], return_weights=True)[1])


def test_blocks_and_stacks_return_weights() -> None:
    x, context = torch.randn(B, L, D), torch.randn(B, 5, 10)
    encoder = randomized(Stack([EncoderBlock(D, HEADS) for _ in range(2)], nn.LayerNorm(D)))
    out, w = encoder(x, return_weights=True)
    assert torch.equal(out, encoder(x))
    assert [layer.shape for layer in w] == [(B, HEADS, L, L)] * 2
    first = encoder.blocks[0]
    assert torch.equal(w[0], first(x, return_weights=True)[1])
    assert torch.equal(w[1], encoder.blocks[1](first(x), return_weights=True)[1])

    decoder = randomized(Stack([DecoderBlock(D, HEADS, kv_model=10) for _ in range(2)]))
    out, w, cross = decoder(x, context, return_weights=True)
    assert torch.equal(out, decoder(x, context))
    assert torch.equal(w[0], w[0].tril())
    assert w[0].shape == (B, HEADS, L, L)
    assert [layer.shape for layer in cross] == [(B, HEADS, L, 5)] * 2
    assert_close(cross[1].sum(-1), torch.ones(B, HEADS, L))

    model = EncoderDecoder(encoder, randomized(Stack([DecoderBlock(D, HEADS, kv_model=D)])))
    out, *lists = model(x, x[:, :4], return_weights=True)
    assert torch.equal(out, model(x, x[:, :4]))
    assert [[tuple(layer.shape[2:]) for layer in kind] for kind in lists] == [
        [(7, 7)] * 2,
        [(4, 4)],
        [(4, 7)],
    ]


BLOCKS: dict[str, Any] = {
    "encoder": lambda residual: EncoderBlock(D, HEADS, residual=residual),
    "decoder": lambda residual: DecoderBlock(D, HEADS, residual=residual, position=Rotary(4)),
    "latent": lambda residual: Block(LAYERS["latent"](), FeedForward(D), residual=residual),
    "additive": lambda residual: Block(AdditiveAttention(D), FeedForward(D), residual=residual),
}


@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_every_block_returns_the_weights_of_its_layers(kind: str, cross: bool, residual: Any) -> None:
    """The weights are those of the layers for the inputs that they receive in the block."""
    block = BLOCKS[kind](residual)
    if cross:
        attend = regard.nn.CrossAttention(D, heads=HEADS, kv_model=10)
        block.cross = residual(D, attend)
    block, x = randomized(block).double(), tokens(B, L)
    inputs = (x, tokens(B, 5)[..., :10]) if cross else (x,)
    sublayers = [part.sublayer for part in (block.attention, block.cross) if part is not None]
    seen: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen[module] = args, options

    for sublayer in sublayers:
        sublayer.register_forward_pre_hook(record, with_kwargs=True)
    options = {"lengths": torch.tensor([7, 3, 5]), "context_mask": M.Lengths(torch.tensor([5, 1, 2]))}
    out, *weights = block(*inputs, return_weights=True, **options)
    assert torch.equal(out, block(*inputs, **options))
    heads = 1 if kind == "additive" else HEADS
    shapes = [(B, heads, L, L), (B, HEADS, L, 5)]
    assert [tuple(w.shape) for w in weights] == shapes[: len(sublayers)]
    for sublayer, w in zip(sublayers, weights, strict=True):
        args, given = seen[sublayer]
        assert torch.equal(w, sublayer(*args, **given | {"return_weights": True})[1])
        assert_close(w.sum(-1), torch.ones(w.shape[:-1]))
    assert not weights[0][1, ..., 3:].any()
    assert not cross or not weights[1][1, ..., 1:].any()


@pytest.mark.parametrize("kind", ["decoder", "latent"])
def test_stacks_return_the_weights_of_decode_steps(kind: str) -> None:
    stack, x = randomized(Stack([BLOCKS[kind](PreNorm) for _ in range(2)])).double(), tokens(B, L)
    expected_out, expected = stack(x, return_weights=True)
    caches = stack.new_caches(B, L)
    with torch.no_grad():
        stack(x[:, :4], caches=caches)
        out, weights = stack(x[:, 4:6], caches=caches, return_weights=True)
    assert_close(out, expected_out[:, 4:6])
    for w, of_block in zip(weights, expected, strict=True):
        assert_close(w, of_block[:, :, 4:6, :6])


def test_blocks_return_the_weights_of_packed_sequences() -> None:
    sizes, context_sizes = [5, 1, 7], [3, 4, 2]
    block = randomized(DecoderBlock(D, HEADS, kv_model=10)).double()
    xs, contexts = [tokens(n) for n in sizes], [tokens(n)[:, :10] for n in context_sizes]
    cu = {"cu_seqlens": packing.cu_seqlens(sizes), "context_cu_seqlens": packing.cu_seqlens(context_sizes)}
    out, w, cross = block(torch.cat(xs), torch.cat(contexts), return_weights=True, **cu)
    assert w.shape == (3, HEADS, 7, 7)
    assert cross.shape == (3, HEADS, 7, 4)
    for n, (x, context) in enumerate(zip(xs, contexts, strict=True)):
        one, of_self, of_cross = block(x, context, return_weights=True)
        assert_close(out.split(sizes)[n], one)
        assert_close(w[n, :, : len(x), : len(x)], of_self)
        assert_close(cross[n, :, : len(x), : len(context)], of_cross)


def test_a_block_without_weights_raises() -> None:
    block = Block(LinearAttention(D, HEADS), FeedForward(D))
    with pytest.raises(TypeError, match="return_weights"):
        block(torch.randn(B, L, D), return_weights=True)


def test_graph_attention_returns_weights() -> None:
    layer, x = GraphAttention(D, 5, heads=3), torch.randn(6, D)
    graph = Graph([[0, 1, 2, 4], [1, 2, 0, 0]], nodes=6)
    out, w = layer(x, graph, return_weights=True)
    assert torch.equal(out, layer(x, graph))
    assert torch.equal(w, layer.weights(x, graph))


# Values from other tokens than keys, and no output projection

WIDTHS: dict[str, Any] = {
    "one projection": ({}, D, D),
    "keys and values": ({"kv_model": 10}, 10, 10),
    "three projections": ({"kv_model": 10, "value_model": 13}, 10, 13),
    "values only": ({"value_model": 13}, D, 13),
}


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("bias", [False, True])
def test_values_from_other_tokens(widths: str, bias: bool) -> None:
    """Four widths, E_q, E_k, E_v and E_total = heads * head_dim, as in the formula."""
    options, of_keys, of_values = WIDTHS[widths]
    sizes = {"kv_heads": 2, "head_dim": 5, "value_dim": 7, "bias": bias}
    layer = randomized(Attention(D, HEADS, **sizes, **options)).double()
    x, keys, values = tokens(B, L), tokens(B, 6)[..., :of_keys], tokens(B, 6)[..., :of_values]
    split = (HEADS * 5, 2 * 5, 2 * 7)
    rows = torch.cat([p.weight.flatten() for p in layer.projections]).split(
        [n * width for n, width in zip(split, (D, of_keys, of_values), strict=True)]
    )
    biases = torch.cat([p.bias for p in layer.projections]).split(split) if bias else (0, 0, 0)
    parts = zip((x, keys, values), rows, biases, (HEADS, 2, 2), strict=True)
    q, k, v = (
        (t @ W.view(-1, t.shape[-1]).T + b).unflatten(-1, (h, -1)).transpose(1, 2) for t, W, b, h in parts
    )
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    w = (q @ k.mT / 5**0.5).softmax(-1)
    expected = layer.out((w @ v).transpose(1, 2).flatten(2))
    out, returned = layer(x, keys, values, return_weights=True)
    assert rel_l2(out, expected) < 1e-12
    assert rel_l2(returned, w) < 1e-12
    assert_close(layer(x, layer.remember(keys, values)), out)
    cu, context_cu = packing.cu_seqlens([L] * B), packing.cu_seqlens([6] * B)
    packed = [t.flatten(0, 1) for t in (x, keys, values)]
    assert_close(layer(*packed, cu_seqlens=cu, context_cu_seqlens=context_cu), out.flatten(0, 1))
    nested = [torch.nested.nested_tensor(list(t), layout=torch.jagged) for t in (x, keys, values)]
    assert_close(layer(*nested).values(), out.flatten(0, 1))


def test_names_of_three_projections() -> None:
    layer = Attention(D, HEADS, kv_model=10, value_model=13, bias=False)
    shapes = {name: tuple(p.shape) for name, p in layer.state_dict().items()}
    assert shapes == {"q.weight": (D, D), "k.weight": (D, 10), "v.weight": (D, 13), "out.weight": (D, D)}
    assert Attention(D, HEADS, value_model=D)(torch.randn(L, D)).shape == (L, D)


def test_no_output_projection() -> None:
    layer, x = randomized(Attention(D, HEADS, value_dim=5, out=False)), torch.randn(B, L, D)
    assert set(layer.state_dict()) == {"qkv.weight", "qkv.bias"}
    (q, k, v), options = layer.arguments(x)
    assert_close(layer(x), regard.attention(q, k, v, **options).transpose(1, 2).flatten(2))
    cache = layer.new_cache(B)
    with torch.no_grad():
        assert layer(x, cache=cache).shape == (B, L, HEADS * 5)


X, C = torch.randn(B, L, D), torch.randn(B, 5, 10)
SELF, CROSS = Attention(D, HEADS), Attention(D, HEADS, kv_model=10)
THREE, OTHER = Attention(D, HEADS, kv_model=10, value_model=13), Attention(D, HEADS, value_model=13)
WRONG: dict[str, Any] = {
    "no context": (partial(SELF, X, value=X), TypeError, "context: expected a tensor"),
    "memory": (lambda: SELF(X, SELF.remember(X), X), TypeError, "a Memory, which has values"),
    "no value": (
        partial(THREE, X, C),
        ValueError,
        "value: expected tokens of width value_model = 13, got None",
    ),
    "self-attention": (partial(OTHER, X), ValueError, "value: expected tokens of width value_model = 13"),
    "lengths": (partial(CROSS, X, C, C[:, 1:]), ValueError, "value: expected (3, 5, 10)"),
    "cache": (partial(OTHER.new_cache, B), ValueError, "got value_model = 13"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values(case: str) -> None:
    call, error, message = WRONG[case]
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


def test_quantized_caches_return_the_weights_of_stored_keys() -> None:
    layer, x = randomized(Attention(64, 2, mask=M.Causal())), torch.randn(B, L, 64)
    cache = QuantizedCache(B, 2, 32)
    with torch.no_grad():
        layer(x[:, :-1], cache=cache)
        _, w = layer(x[:, -1:], cache=cache, return_weights=True)
    assert w.shape == (B, 2, 1, L)
    assert_close(w.sum(-1), torch.ones(B, 2, 1))


def test_sliding_caches_return_the_weights_of_stored_keys() -> None:
    layer, x = randomized(Attention(D, HEADS, mask=M.sliding(3))).double(), tokens(B, L)
    expected = layer(x, return_weights=True)[1][:, :, -1:, -3:]
    cache = SlidingCache(B, HEADS, 6, window=3, spare=1, dtype=torch.float64)
    with torch.no_grad():
        for part in x.split(1, 1):
            _, w = layer(part, cache=cache, return_weights=True)
    assert_close(w.sort(-1).values[..., -3:], expected.sort(-1).values)
    assert_close(w.sum(-1), torch.ones(B, HEADS, 1))
