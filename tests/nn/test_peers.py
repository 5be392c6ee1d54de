"""Compares `nn.Attention` with Hugging Face's and x-transformers' attention on the same weights.

Their modules run in float64, ours in float32. Relative errors stay below 2e-6.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import masks as M, nn as rnn
from regard.nn import Attention
from regard.positions import AlibiBias, Llama3, Relative, Rotary, Scaling, YaRN
from support import HAVE_CORE, rel_l2

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
LIMIT, B, L, WIDTH, HEADS = 2e-6, 2, 13, 48, 6


def random_float64(module: nn.Module) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.15)
    return module.double()


def load_projections(ours: Attention, qkv: Sequence[nn.Linear], out: nn.Linear) -> Attention:
    """Packs their projections into our module."""
    names = ["weight"] if qkv[0].bias is None else ["weight", "bias"]
    state = {f"qkv.{name}": torch.cat([getattr(layer, name) for layer in qkv]) for name in names}
    state |= {f"out.{name}": x for name, x in out.state_dict().items()}
    missing, unexpected = ours.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
    assert not unexpected
    assert all(name.startswith("position") for name in missing)
    return ours


def compare(ours: Any, x: Tensor, expected: Tensor, x64: Tensor, pairs: list[Any]) -> None:
    """Compares results and the gradients of the tokens and of `pairs` (our parameter, theirs)."""
    x32 = x.clone().requires_grad_()
    out, dout = ours(x32), torch.randn(x.shape)
    assert rel_l2(out, expected) < LIMIT
    grads = torch.autograd.grad(out, [x32, *(a for a, _ in pairs)], dout)
    expected_grads = torch.autograd.grad(expected, [x64, *(b for _, b in pairs)], dout.double())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert rel_l2(grad, expected_grad) < LIMIT


def tokens() -> tuple[Tensor, Tensor]:
    x = torch.randn(B, L, WIDTH)
    return x, x.double().requires_grad_()


def causal_bias() -> Tensor:
    lowest = torch.finfo(torch.float64).min
    return torch.full((L, L), lowest, dtype=torch.float64).triu(1)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [({"rope_type": "default"}, None), (LLAMA3, Llama3(8.0, 1.0, 4.0, 64)), (YARN, YaRN(4.0, 64))],
    ids=["plain", "llama3", "yarn"],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_llama(rope: dict[str, Any], scaling: Scaling | None, kv_heads: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    config = llama.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=kv_heads, head_dim=10,
        attention_bias=True, rope_parameters={"rope_theta": 10000.0} | rope,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = random_float64(llama.LlamaAttention(config, 0))
    ours = Attention(
        WIDTH, HEADS, kv_heads=kv_heads, head_dim=10, mask=M.Causal(), position=Rotary(10, scaling=scaling)
    )
    load_projections(ours, [theirs.q_proj, theirs.k_proj, theirs.v_proj], theirs.o_proj)
    x, x64 = tokens()
    table = llama.LlamaRotaryEmbedding(config)(x64, torch.arange(L)[None])
    expected, _ = theirs(x64, table, causal_bias())
    compare(ours, x, expected, x64, [(ours.out.weight, theirs.o_proj.weight)])


@pytest.mark.parametrize("decoder", [False, True])
def test_t5(decoder: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")

    config = t5.T5Config(
        d_model=WIDTH, d_kv=8, num_heads=HEADS, relative_attention_num_buckets=8,
        relative_attention_max_distance=10, is_decoder=decoder,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = random_float64(t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)).eval()
    position = Relative(HEADS, num_buckets=8, max_distance=10, bidirectional=not decoder)
    ours = Attention(
        WIDTH, HEADS, bias=False, scale=1.0, position=position, mask=M.Causal() if decoder else None
    )
    load_projections(ours, [theirs.q, theirs.k, theirs.v], theirs.o)
    position.load_state_dict({"table": theirs.relative_attention_bias.weight.float()})
    x, x64 = tokens()
    expected = theirs(x64, mask=causal_bias() if decoder else None)[0]
    compare(ours, x, expected, x64, [(position.table, theirs.relative_attention_bias.weight)])


def queries_first(layer: nn.Linear, order: tuple[int, ...]) -> nn.Linear:
    """Reorders BLOOM's packed projection from (head, qkv) to (qkv, head): queries come first."""
    reordered = nn.Linear(layer.in_features, layer.out_features).double()
    for name, x in layer.state_dict().items():
        getattr(reordered, name).data = x.unflatten(0, order).transpose(0, 1).flatten(0, 2).clone()
    return reordered


def test_bloom() -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")

    theirs = random_float64(
        bloom.BloomAttention(bloom.BloomConfig(hidden_size=WIDTH, n_head=HEADS), 0)
    ).eval()
    ours = Attention(WIDTH, HEADS, position=AlibiBias(HEADS), mask=M.Causal())
    load_projections(ours, [queries_first(theirs.query_key_value, (HEADS, 3, 8))], theirs.dense)
    x, x64 = tokens()
    alibi = bloom.build_alibi_tensor(torch.ones(B, L, dtype=torch.int64), HEADS, torch.float64)
    expected = theirs(x64, torch.zeros_like(x64), alibi, causal_bias())[0]
    compare(ours, x, expected, x64, [(ours.out.weight, theirs.dense.weight)])


def test_mpt() -> None:
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")

    theirs = random_float64(mpt.MptAttention(mpt.MptConfig(d_model=WIDTH, n_heads=4), 0)).eval()
    ours = Attention(WIDTH, 4, position=AlibiBias(4), mask=M.Causal(), bias=False)
    load_projections(ours, [theirs.Wqkv], theirs.out_proj)
    x, x64 = tokens()
    alibi = mpt.build_mpt_alibi_tensor(4, L).double()
    expected = theirs(x64, alibi, attention_mask=torch.ones(L, L).triu(1).bool())[0]
    compare(ours, x, expected, x64, [(ours.out.weight, theirs.out_proj.weight)])


def x_transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from their use of PyTorch
        return pytest.importorskip("x_transformers.x_transformers")


@pytest.mark.parametrize("kind", ["plain", "grouped", "rotary", "softclamp", "gate"])
def test_x_transformers(kind: str) -> None:
    peer = x_transformers()
    kv_heads, their_options, our_options = 2 if kind == "grouped" else HEADS, {}, {}
    call_options: dict[str, Any] = {}
    if kind == "rotary":
        our_options, call_options = {"position": Rotary(4, layout="interleaved")}, {"rotary_pos_emb": None}
    if kind == "softclamp":
        our_options, their_options = (
            {"softcap": 5.0},
            {"softclamp_logits": True, "logit_softclamp_value": 5.0},
        )
    if kind == "gate":
        our_options, their_options = {"gate": True}, {"gate_values": True}
    theirs = random_float64(
        peer.Attention(WIDTH, dim_head=8, heads=HEADS, kv_heads=kv_heads, causal=True, **their_options)
    )
    ours = Attention(WIDTH, HEADS, kv_heads=kv_heads, mask=M.Causal(), bias=False, **our_options)
    if ours.gate is not None:
        (weight,) = theirs.to_v_gate.parameters()
        ours.gate.load_state_dict({"weight": weight.float()})
    # Their query head h reads key head h % kv_heads, ours h // (heads / kv_heads).
    order = torch.arange(HEADS * 8).view(-1, kv_heads, 8).transpose(0, 1).flatten()
    qkv_weights = (theirs.to_q.weight[order], theirs.to_k.weight, theirs.to_v.weight)
    state = {"qkv.weight": torch.cat(qkv_weights), "out.weight": theirs.to_out.weight[:, order]}
    missing, _ = ours.load_state_dict({k: x.float() for k, x in state.items()}, strict=False)
    assert set(missing) <= {"gate.weight"}
    x, x64 = tokens()
    if kind == "rotary":
        call_options["rotary_pos_emb"] = peer.RotaryEmbedding(4)(torch.arange(L))
    expected = theirs(x64, **call_options)
    compare(ours, x, expected, x64, [])


def test_llama_block() -> None:
    """A whole layer: pre-RMSNorm, grouped heads, rotary, SwiGLU."""
    from functools import partial

    llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    config = llama.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=2, intermediate_size=80,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, rms_norm_eps=1e-5,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = random_float64(llama.LlamaDecoderLayer(config, 0))
    attention = Attention(WIDTH, HEADS, kv_heads=2, bias=False, mask=M.Causal(), position=Rotary(8))
    their_attention = theirs.self_attn
    load_projections(
        attention,
        [their_attention.q_proj, their_attention.k_proj, their_attention.v_proj],
        their_attention.o_proj,
    )
    feed = rnn.SwiGLU(WIDTH, 80)
    feed.gate_up.weight.data = torch.cat((theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight)).float()
    feed.down.weight.data = theirs.mlp.down_proj.weight.float()
    block = rnn.Block(attention, feed, residual=partial(rnn.PreNorm, norm=partial(nn.RMSNorm, eps=1e-5)))
    block.attention.norm.weight.data = theirs.input_layernorm.weight.float()
    block.feed_forward.norm.weight.data = theirs.post_attention_layernorm.weight.float()
    x, x64 = tokens()
    table = llama.LlamaRotaryEmbedding(config)(x64, torch.arange(L)[None])
    expected = theirs(x64, position_embeddings=table, attention_mask=causal_bias())
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert rel_l2(block(x), expected) < LIMIT
