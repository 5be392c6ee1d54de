"""Compares blocks and stacks with PyTorch on the same weights; tests decoding and errors."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks as M, packing
from regard.nn import (
    Attention,
    Block,
    CrossAttention,
    DecoderBlock,
    EncoderBlock,
    EncoderDecoder,
    FeedForward,
    GatedFeedForward,
    Memory,
    PostNorm,
    PreNorm,
    Stack,
    SwiGLU,
)
from regard.positions import Learned, Rotary
from support import HAVE_CORE, assert_close, rel_l2
from support.modules import ListCache, causal_mask, randomized

pytestmark = [
    pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]
D, HEADS = 24, 4


def load_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    state = {"out.weight": theirs.out_proj.weight, "out.bias": theirs.out_proj.bias}
    W, b = theirs.in_proj_weight, theirs.in_proj_bias
    if ours.kv_model is None:
        state |= {"qkv.weight": W, "qkv.bias": b}
    else:
        state |= {"q.weight": W[:D], "kv.weight": W[D:], "q.bias": b[:D], "kv.bias": b[D:]}
    ours.load_state_dict(state)


def load_layer(ours: Any, theirs: Any) -> None:
    """Copies the weights of a PyTorch layer into ours."""
    load_attention(ours.attention.sublayer, theirs.self_attn)
    norms = [ours.attention.norm, ours.feed_forward.norm]
    if ours.cross is not None:
        load_attention(ours.cross.sublayer, theirs.multihead_attn)
        norms.insert(1, ours.cross.norm)
    for n, norm in enumerate(norms, 1):
        norm.load_state_dict(getattr(theirs, f"norm{n}").state_dict())
    ours.feed_forward.sublayer.up.load_state_dict(theirs.linear1.state_dict())
    ours.feed_forward.sublayer.down.load_state_dict(theirs.linear2.state_dict())


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_block_matches_pytorch(norm_first: bool) -> None:
    theirs = randomized(nn.TransformerEncoderLayer(
        D, HEADS, 40, 0.0, F.gelu, batch_first=True, norm_first=norm_first))  # fmt: skip
    ours = EncoderBlock(D, HEADS, hidden=40, residual=PreNorm if norm_first else PostNorm)
    load_layer(ours, theirs)
    x = torch.randn(2, 7, D)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    expected = theirs.double()(x.double(), src_key_padding_mask=padding)
    assert rel_l2(ours(x, lengths=torch.tensor([7, 4])), expected) < 2e-6


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_block_matches_pytorch(norm_first: bool) -> None:
    theirs = randomized(nn.TransformerDecoderLayer(
        D, HEADS, 40, 0.0, F.gelu, batch_first=True, norm_first=norm_first))  # fmt: skip
    ours = DecoderBlock(D, HEADS, kv_model=D, hidden=40, residual=PreNorm if norm_first else PostNorm)
    load_layer(ours, theirs)
    x, memory = torch.randn(2, 7, D), torch.randn(2, 5, D)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    expected = theirs.double()(
        x.double(), memory.double(), tgt_mask=causal_mask(7).double(), memory_key_padding_mask=padding
    )
    out = ours(x, memory, context_mask=M.Lengths(torch.tensor([5, 3])))
    assert rel_l2(out, expected) < 2e-6


def test_residuals_match_their_formulas() -> None:
    x, layer = torch.randn(5, D), nn.Linear(D, D)
    pre, post = PreNorm(D, layer, norm=nn.RMSNorm), PostNorm(D, layer)
    assert_close(pre(x), x + layer(F.rms_norm(x, (D,), pre.norm.weight)))
    assert_close(post(x), F.layer_norm(x + layer(x), (D,), post.norm.weight, post.norm.bias))
    assert torch.equal(PreNorm(D, layer, dropout=1.0)(x), x)


def test_feed_forward_layers_match_their_formulas() -> None:
    x = torch.randn(5, D)
    feed_forward = FeedForward(D)
    assert feed_forward.up.out_features == 4 * D
    assert_close(feed_forward(x), feed_forward.down(F.gelu(feed_forward.up(x))))
    gated = SwiGLU(D, 40)
    gate, up = gated.gate_up.weight.chunk(2)
    assert_close(gated(x), gated.down(F.silu(x @ gate.T) * (x @ up.T)))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (FeedForward(96, bias=False), SwiGLU(96))]
    assert sizes[0] == sizes[1]
    geglu = GatedFeedForward(D, activation=F.gelu)
    gate, up = geglu.gate_up(x).chunk(2, -1)
    assert_close(geglu(x), geglu.down(F.gelu(gate) * up))


def decoder(layers: int = 2, **options: Any) -> Stack:
    blocks = [DecoderBlock(D, HEADS, kv_heads=2, position=Rotary(6), **options) for _ in range(layers)]
    return randomized(Stack(blocks, nn.LayerNorm(D)))  # type: ignore[no-any-return]


def caches(stack: Stack) -> list[ListCache]:
    return [ListCache(torch.zeros(2, dtype=torch.int64)) for _ in stack.blocks]


def test_decoding_with_caches_matches_one_call() -> None:
    model, x = decoder().eval(), torch.randn(2, 9, D)
    layer_caches = caches(model)
    with torch.no_grad():
        steps = [model(chunk, caches=layer_caches) for chunk in x.split((4, 1, 1, 3), 1)]
    assert_close(torch.cat(steps, 1), model(x))
    assert len(layer_caches[0]) == 9


def test_decoder_is_causal() -> None:
    model, x = decoder(), torch.randn(2, 9, D)
    other = x.clone()
    other[:, 5:] = torch.randn(2, 4, D)
    assert torch.equal(model(x)[:, :5], model(other)[:, :5])


def test_packed_and_nested_inputs_of_a_stack() -> None:
    model, x, sizes = decoder(), torch.randn(3, 7, D), [5, 2, 7]
    alone = torch.cat([model(x[s, :n]) for s, n in enumerate(sizes)])
    packed = packing.pack(x, torch.tensor(sizes))
    assert_close(model(packed, cu_seqlens=packing.cu_seqlens(sizes)), alone)
    nested = torch.nested.nested_tensor([x[s, :n] for s, n in enumerate(sizes)], layout=torch.jagged)
    assert_close(model(nested).values(), alone)


def encoder_decoder() -> EncoderDecoder:
    encoder = Stack([EncoderBlock(D, HEADS) for _ in range(2)], nn.LayerNorm(D))
    return EncoderDecoder(encoder, decoder(kv_model=D)).eval()


def test_translation_projects_the_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = encoder_decoder(), torch.tensor([6, 3])
    source, target = torch.randn(2, 6, D), torch.randn(2, 5, D)
    source_mask = M.Lengths(lengths)
    with torch.no_grad():
        expected = model(source, target, source_mask=source_mask)
        memory = model.decoder.remember(model.encoder(source, mask=source_mask))
        assert all(isinstance(m, Memory) for m in memory)
        monkeypatch.setattr(Attention, "_keys", lambda *_: pytest.fail("the source was projected again"))
        layer_caches = caches(model.decoder)
        steps = [
            model.decoder(t, memory, caches=layer_caches, context_mask=source_mask)
            for t in target.split(1, 1)
        ]
    assert_close(torch.cat(steps, 1), expected)


def test_stacks_learn() -> None:
    """A block learns to reverse a sequence, which needs attention."""
    torch.manual_seed(0)
    block = Block(Attention(D, HEADS), SwiGLU(D), residual=partial(PreNorm, norm=nn.RMSNorm))
    model = nn.Sequential(nn.Embedding(5, D), Learned(6, D), Stack([block], nn.RMSNorm(D)), nn.Linear(D, 5))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(150):
        text = torch.randint(5, (32, 6))
        loss = F.cross_entropy(model(text).flatten(0, 1), text.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5
    assert sum(losses[-5:]) / 5 < 0.5


def test_a_checkpoint_of_a_stack() -> None:
    model, other = decoder(), decoder()
    x = torch.randn(2, 5, D)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(other(x), model(x))
    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    del state["blocks.1.feed_forward.norm.bias"]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        RuntimeError, match=r"nothing was loaded; expected also blocks.1.feed_forward.norm.bias"
    ):
        model.load_state_dict(state)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in before.items())


def test_blocks_that_are_not_neighbours_may_not_share_a_cache() -> None:
    model = Stack([DecoderBlock(D, HEADS) for _ in range(3)])
    first, second = model.new_caches(2)[:2]
    with pytest.raises(ValueError, match=r"caches: .* got the same cache more than once"):
        model(torch.randn(2, 7, D), caches=[first, second, first])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m(x, x), "context: expected None for this block, got Tensor"),
        (lambda m, x: m(x, caches=[]), "caches: expected one for each of 2 blocks, got 0"),
        (lambda m, x: m(x, caches=[m.new_caches(2)[0]] * 2), "caches: .* got the same cache more than once"),
        (lambda m, x: m.remember(x), "remember: expected a block with cross-attention, got none"),
        (lambda m, x: DecoderBlock(D, HEADS, kv_model=D)(x), "context: expected a tensor or a Memory"),
    ],
)
def test_wrong_stacks(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(decoder(), torch.randn(2, 5, D))


def test_one_cache_for_many_blocks() -> None:
    """Blocks that share a cache would mix their keys. The message names the argument."""
    model, x = decoder(), torch.randn(2, 5, D)
    cache = model.new_caches(2)[0]
    with pytest.raises(TypeError, match=r"cache: write caches=, a list with one cache for each of 2 blocks"):
        model(x, cache=cache)
    with pytest.raises(
        TypeError, match=r"caches: expected a list with one cache for each of 2 blocks.*KVCache"
    ):
        model(x, caches=cache)
    assert len(cache) == 0


def test_a_stack_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    model, x = decoder(), torch.randn(2, 5, D)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_cross_attention_of_another_width() -> None:
    block = Block(Attention(D, HEADS), FeedForward(D), cross=CrossAttention(D, heads=HEADS, kv_model=10))
    x, context = torch.randn(2, 5, D), torch.randn(2, 3, 10)
    out: Tensor = block(x, context)
    assert out.shape == x.shape
    assert torch.equal(block(x, block.remember(context)), out)
