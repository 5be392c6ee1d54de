"""Cost estimates against published figures, caches, kernels, modules and saved tensors."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import cost, masks as M
from regard._backends.native import core
from regard.cache import KVCache, LatentCache, LinearCache, PagedCache, QuantizedCache, SlidingCache
from regard.cost import (
    AttentionSpec,
    BigBirdSpec,
    CallSpec,
    LatentSpec,
    LinearSpec,
    LinformerSpec,
    LongformerSpec,
    ModelSpec,
    PerformerSpec,
    allocated_bytes,
    cache_bytes,
    estimate,
    from_config,
    from_module,
    layers_in,
)
from regard.cost._sparse import SEGMENT
from support import HAVE_CORE

MIB = 2**20
MACHINE = cost.Machine(threads=1, fma=1e11, read=((2**20, 4e10), (2**24, 1e10)), call=1e-5)
SMALL = AttentionSpec(48, 6)
DEEPSEEK = (512, 128, 64, 128)  # rank, nope_dim, rope_dim, value_dim of DeepSeek-V2 and V3
LATENT = ["--rank=512", "--nope-dim=128", "--rope-dim=64", "--value-dim=128"]
WRONG: Any = "both"
native = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


# Published figures, each with its source


def decoder(kind: str, **sizes: Any) -> ModelSpec:
    """Returns a model. Vocabulary and feed-forward width are arbitrary unless given."""
    return from_config({"model_type": kind, "vocab_size": 32000, "intermediate_size": 8192} | sizes)


def llama(n: int, d: int, H: int, Hkv: int) -> ModelSpec:
    return decoder(
        "llama", num_hidden_layers=n, hidden_size=d, num_attention_heads=H, num_key_value_heads=Hkv
    )


def deepseek(n: int, d: int, H: int) -> ModelSpec:
    return decoder(
        "deepseek_v3", num_hidden_layers=n, hidden_size=d, num_attention_heads=H, kv_lora_rank=512,
        q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
    )  # fmt: skip


def gpt2(n: int, d: int, H: int) -> ModelSpec:
    """Returns the GPT-2 of nanoGPT, without biases."""
    sizes = {"n_layer": n, "n_embd": d, "n_head": H, "n_positions": 1024, "vocab_size": 50257}
    return from_config({"model_type": "gpt2", "bias": False} | sizes)


def mistral() -> ModelSpec:
    return decoder(
        "mistral", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
        sliding_window=4096,
    )  # fmt: skip


def gemma() -> ModelSpec:
    return decoder(
        "gemma3_text", num_hidden_layers=26, hidden_size=1152, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, sliding_window=512, sliding_window_pattern=6,
    )  # fmt: skip


def test_1_opt_13b() -> None:
    """PagedAttention, arXiv 2309.06180, section 3: 800 KB for a token, 1.6 GB for 2,048."""
    model = from_config(
        {"model_type": "opt", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40,
         "ffn_dim": 20480, "max_position_embeddings": 2048, "vocab_size": 50272}
    )  # fmt: skip
    assert cache_bytes(model, 1) == 819_200 == 800 * 1024
    assert cache_bytes(model, 2048) == 819_200 * 2048


@pytest.mark.parametrize(
    ("number", "model", "expected"),
    [
        # DeepSeek-V3 Insights, arXiv 2505.09343, table 1: 70.272 KB, 516.096 KB, 327.680 KB.
        (2, deepseek(61, 7168, 128), 70_272),
        (3, llama(126, 16384, 128, 8), 516_096),
        (4, llama(80, 8192, 64, 8), 327_680),
        # future-shock.ai, "The weight of remembering": 300 KiB, 128 KiB.
        (5, gpt2(48, 1600, 25), 307_200),
        (6, llama(32, 4096, 32, 8), 131_072),
    ],
)
def test_2_to_6_bytes_of_a_token(number: int, model: ModelSpec, expected: int) -> None:
    assert cache_bytes(model, 1, format="bfloat16") == expected


def test_7_llama_2_7b() -> None:
    """Hugging Face's blog on quantised caches: about 5 GB for 10,000 tokens."""
    assert cache_bytes(llama(32, 4096, 32, 32), 10_000) == 5_242_880_000


def test_8_and_9_deepseek_v2() -> None:
    """DeepSeek-V2, arXiv 2405.04434: MLA caches as much as GQA with 2.25 groups.

    The other numbers are cached elements per token of MLA and MHA, for the small and large model.
    """
    latent = LatentSpec(5120, 128, rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    assert Fraction(latent.kv_values, AttentionSpec(5120, 1, head_dim=128).kv_values) == Fraction(9, 4)
    assert (27 * latent.kv_values, 60 * latent.kv_values) == (15_552, 34_560)
    assert 27 * AttentionSpec(2048, 16, head_dim=128).kv_values == 110_592
    assert 60 * AttentionSpec(7168, 56, head_dim=128).kv_values == 860_160


def test_10_and_11_logs_of_llama_cpp() -> None:
    """At 512 tokens: 162.50 MB for open-llama-3B-v2; 4.50 MiB each for K and V of a small model."""
    assert cache_bytes(llama(26, 3200, 32, 32), 512) == 170_393_600 == 162.5 * MIB
    small = llama(12, 384, 6, 6)
    assert cache_bytes(small, 512) == 9 * MIB
    keys, values = small.layers[0].kept
    assert 12 * 512 * 2 * keys.heads * keys.width == 4.5 * MIB
    assert keys == values


def test_12_and_13_logs_of_ik_llama_cpp() -> None:
    """Pull requests 259 and 240: R1 in q8_0 takes 1166.62 MiB.

    V2-Lite stores its latents twice, which takes 1728 and 985.5 MiB.
    """
    assert cache_bytes(deepseek(61, 7168, 128), 32_768, format="q8_0") == 1166.625 * MIB
    lite = [LatentSpec(2048, 16, *DEEPSEEK)] * 27
    assert cache_bytes(lite, 65_536, format="q8_KV") == 985.5 * MIB
    transposed = [LatentSpec(2048, 16, 512, 128, 0, 128)] * 27
    assert cache_bytes(transposed, 65_536, format="float16") == 1728 * MIB


def test_14_gemma_3_1b() -> None:
    """mlxcel, pull request 172: 139 MiB at 32,768 tokens; 832 MiB if no layer had a window."""
    model = gemma()
    assert [layer.most_kept for layer in model.layers].count(512) == 22
    assert cache_bytes(model, 32_768) == 139 * MIB
    assert cache_bytes([AttentionSpec(1152, 4, 1, 256)] * 26, 32_768) == 832 * MIB


def test_15_mistral_7b() -> None:
    """Mistral 7B, arXiv 2310.06825: the window makes the cache 8 times smaller at 32k tokens.

    Through all layers, attention reaches 131K tokens back.
    """
    model = mistral()
    assert cache_bytes(model, 32_768) == 512 * MIB
    assert cache_bytes(llama(32, 4096, 32, 8), 32_768) == 8 * 512 * MIB
    assert model.reach == 131_072
    assert llama(2, 64, 2, 2).reach is None


def test_16_and_17_gpt2_small() -> None:
    """Parameters and FLOPs from nanoGPT's transformer_sizing.ipynb."""
    model = gpt2(12, 768, 12)
    assert model.parameters == 124_337_664
    assert model.layers[0].parameters + 768 == 2_360_064  # with its norm
    layer = estimate(model.layers[0], 1024)
    assert layer.products == {"q, k, v": 3_623_878_656, "out": 1_207_959_552}
    assert layer.forward.dense == 1_610_612_736 + 1_610_612_736  # scores, reduce
    model_cost = estimate(model, 1024)
    assert model_cost.forward_flops.dense == 291_648_307_200
    assert model_cost.training_flops == 874_944_921_600
    assert model.palm_flops(1024) == 879_894_724_608


def test_18_sdpa() -> None:
    """FLOPs of SDPA with q, k and v of shape (1, 12, 64, 64), from PyTorch issue 195460."""
    assert CallSpec(Hq=12, Lq=64, D=64).cost().forward.dense == 12_582_912


# Caches of Regard


KINDS: dict[str, tuple[Any, dict[str, Any], Callable[[], Any]]] = {
    "dense": (AttentionSpec(48, 6, 2, 8, 5), {}, lambda: KVCache(3, 2, 8, 5)),
    "capacity": (AttentionSpec(48, 6, 2, 8, 5), {"capacity": 301}, lambda: KVCache(3, 2, 8, 5, capacity=301)),
    "bfloat16": (
        AttentionSpec(48, 6, 2, 8), {"format": torch.bfloat16},
        lambda: KVCache(3, 2, 8, dtype=torch.bfloat16),
    ),
    "int8": (AttentionSpec(48, 6, 2, 40), {"format": "int8"}, lambda: QuantizedCache(3, 2, 40)),
    "int4": (
        AttentionSpec(48, 6, 2, 40, 33), {"format": "int4"}, lambda: QuantizedCache(3, 2, 40, 33, bits=4),
    ),
    "latent": (LatentSpec(48, 6, 24, 128, 7, 128), {}, lambda: LatentCache(3, 24, 7)),
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 63, 64, 211])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_row_caches(kind: str, tokens: int) -> None:
    layer, options, make = KINDS[kind]
    cache = make()
    dtype = options.get("format") if isinstance(options.get("format"), torch.dtype) else torch.float32
    if isinstance(cache, LatentCache):
        cache.append(torch.zeros(3, tokens, 31))
    else:
        k, v = (torch.zeros(3, 2, tokens, n, dtype=dtype) for n in (cache.D, cache.Dv))
        cache.append(k, v)
    options = {"format": torch.float32} | options
    assert allocated_bytes(layer, tokens, B=3, **options) == cache.nbytes
    needed = cache_bytes(layer, tokens, B=3, format=options["format"])
    state = cache.state_dict()
    assert needed == sum(x.nbytes for name, x in state.items() if name != "lengths")


@pytest.mark.parametrize(("window", "sinks"), [(8, 0), (64, 4), (100, 3)])
def test_bytes_of_a_sliding_cache(window: int, sinks: int) -> None:
    layer, cache = (
        AttentionSpec(48, 6, 2, window=window, sinks=sinks),
        SlidingCache(1, 2, 8, window=window, sinks=sinks),
    )
    k = torch.zeros(1, 2, 300, 8)
    cache.append(k, k)
    assert allocated_bytes(layer, 300, format="float32") == cache.nbytes
    assert cache_bytes(layer, 300, format="float32") == (window + sinks) * 2 * 16 * 4
    assert cache_bytes(layer, 5, format="float32") == 5 * 2 * 16 * 4


@pytest.mark.parametrize("tokens", [1, 16, 17, 100])
def test_bytes_of_a_paged_cache(tokens: int) -> None:
    cache = PagedCache(3 * -(-tokens // 16), 2, 8)
    for _ in range(3):
        cache.add()
    k = torch.zeros(3, 2, tokens, 8)
    cache.append(k, k)
    assert cache.free_pages == 0
    assert allocated_bytes(AttentionSpec(48, 6, 2), tokens, B=3, format="float32", page=16) == cache.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes_of_a_linear_cache(dtype: torch.dtype) -> None:
    cache = LinearCache(3, 2, 8, 5, normalize=True, dtype=dtype)
    layer = LinearSpec(48, 6, 2, 8, 5)
    for tokens in (0, 1000):
        assert allocated_bytes(layer, tokens, B=3, format=dtype) == cache.nbytes
        assert cache_bytes(layer, tokens, B=3, format=dtype) == cache.nbytes


# Work of the kernels


MASKS = {
    "none": None,
    "causal": M.Causal(),
    "window": M.Window(9, 4),
    "sinks": M.streaming(11, 3),
    "documents": M.Documents(torch.arange(101) // 23) & M.Causal(),
    "lengths": M.Lengths(torch.tensor([40, 101])),
    "longformer": M.longformer((7, 7), [0, 50]),
    "bigbird": M.bigbird(8),
    "dilated": M.Window(30, 30) & M.Dilated(3),
    "blocks": M.Blocks(torch.rand(4, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.5, 16),
    "per head": M.PerHead([M.Causal(), M.Window(3, 0), M.Prefix(5), ~M.Window(20, 0)]),
}


def executed_pairs(keep: Tensor, panel: int, step: int) -> int:
    """Counts the pairs that panels compute: a key that one row needs is computed for all lanes."""
    pairs = 0
    for head in keep.flatten(0, 1):
        for first in range(step):
            for rows in head[first::step].split(panel):
                lanes = len(rows) if len(rows) <= panel // 4 else panel
                pairs += int(rows.any(0).sum()) * lanes
    return pairs


@native
@pytest.mark.parametrize("name", MASKS)
def test_flops_equal_the_pairs_of_the_panels(name: str) -> None:
    B, H, L, D, Dv, mask = 2, 4, 101, 8, 5, MASKS[name]
    keep = (torch.ones(L, L).bool() if mask is None else mask.to_dense(L, L)).expand(B, H, L, L)
    call_cost = CallSpec(B, H, L, D, Dv=Dv, mask=mask).cost()
    panel = core.panel_rows()
    pairs = B * H * L * L, B * H * L * (L + 1) // 2, int(keep.sum())
    expected = cost.Flops(*pairs, executed_pairs(keep, panel, 3 if name == "dilated" else 1))
    assert call_cost.pairs == expected
    assert call_cost.forward == expected.times(2 * (D + Dv))
    assert call_cost.backward == expected.times(2 * (3 * D + 2 * Dv))


@native
def test_flops_equal_the_plan_and_the_counter_of_pytorch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(2, H, 70, 8, requires_grad=True) for H in (6, 2, 2))
    mask = M.streaming(20, 2)
    call_cost = CallSpec(2, 6, 70, 8, Hkv=2, mask=mask).cost()
    plan = regard.plan(q, k, v, mask=mask)
    assert (call_cost.forward.visible, call_cost.forward.executed) == (plan.flops, plan.flops_executed)
    assert (call_cost.read_bytes, call_cost.written_bytes) == (plan.bytes_read, plan.bytes_written)
    assert call_cost.written_bytes + call_cost.scratch_bytes == plan.peak_extra_bytes
    with FlopCounterMode(display=False) as counter:
        regard.attention(q, k, v, mask=mask).sum().backward()
    assert counter.get_total_flops() == call_cost.forward.visible + call_cost.backward.visible


@pytest.mark.parametrize("name", MASKS)
def test_without_the_core_masks_are_counted_from_their_dense_form(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "reason_unavailable", lambda: "missing")
    B, H, L, mask = 2, 4, 101, MASKS[name]
    keep = (torch.ones(L, L).bool() if mask is None else mask.to_dense(L, L)).expand(B, H, L, L)
    call_cost = CallSpec(B, H, L, 8, mask=mask).cost()
    assert (call_cost.pairs.visible, call_cost.pairs.executed) == (int(keep.sum()), B * H * L * L)
    assert (call_cost.scratch_bytes, call_cost.decodes) == (0, False)
    with pytest.raises(NotImplementedError, match="without the compiled core, got 9000 x 9000"):
        CallSpec(Lq=9000, mask=M.Causal()).cost()
    with pytest.raises(RuntimeError, match="measure_machine: missing"):
        cost.measure_machine()


@pytest.mark.parametrize(("Lq", "Lk"), [(5, 5), (3, 8), (1, 9), (8, 3)])
def test_causal_pairs_equal_those_of_the_mask(Lq: int, Lk: int) -> None:
    assert CallSpec(Lq=Lq, Lk=Lk).cost().pairs.causal == int(M.Causal().to_dense(Lq, Lk).sum())


@pytest.mark.parametrize("Lk", [100_000, 10**6])
def test_long_contexts_need_no_dense_mask(Lk: int) -> None:
    call_cost = CallSpec(Hq=128, Lq=1, Lk=Lk, D=128, mask=M.sliding(4096)).cost()
    assert call_cost.pairs.visible == 128 * 4096
    assert call_cost.pairs.dense == 128 * Lk


# Tensors saved for backward


def saved_bytes(run: Callable[[], Tensor], parameters: set[int]) -> int:
    """Returns the bytes of the storages that autograd saves, without parameters."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = run()
    del output
    return sum(sizes.values())


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_bytes_of_a_call(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, H, 70, n, dtype=dtype, requires_grad=True) for H, n in ((6, 8), (2, 8), (2, 5)))
    mask = M.Documents(torch.arange(70) // 20)
    measured = saved_bytes(lambda: regard.attention(q, k, v, mask=mask), set())
    assert measured == CallSpec(2, 6, 70, 8, 2, Dv=5, dtype=dtype, mask=mask).cost().saved_bytes


@native
def test_saved_bytes_of_a_bias() -> None:
    q = torch.randn(2, 6, 70, 8, requires_grad=True)
    bias = torch.randn(1, 6, 70, 70, requires_grad=True)
    measured = saved_bytes(lambda: regard.attention(q, q.clone(), q.clone(), bias=bias), set())
    assert measured == CallSpec(2, 6, 70, 8, bias=(1, 6, 70, 70)).cost().saved_bytes


def modules() -> dict[str, nn.Module]:
    """Returns one module of each kind by name."""
    R = regard.nn
    E = R.LinformerProjection(64, 16, sharing="none", heads=6)
    return {
        "heads": R.Attention(48, 6, mask=M.Causal()),
        "grouped": R.Attention(48, 6, kv_heads=2, head_dim=10, value_dim=7, bias=False, gate=True, sink=True),
        "normed": R.Attention(48, 6, kv_heads=1, qk_norm=nn.RMSNorm, out_bias=False),
        "cross": R.CrossAttention(48, heads=6, kv_model=32),
        "values": R.Attention(48, 6, kv_model=32, value_model=20, kv_heads=2, value_dim=7),
        "no output": R.Attention(48, 6, value_dim=5, out=False),
        "relative": R.Attention(48, 6, position=regard.positions.Relative(6)),
        "multihead": R.MultiheadAttention(48, 6, batch_first=True),
        "torch": nn.MultiheadAttention(48, 6, bias=False),
        "latent": R.LatentAttention(48, 6, rank=16, nope_dim=8, rope_dim=4, bias=True),
        "latent queries": R.LatentAttention(48, 6, rank=16, nope_dim=8, rope_dim=4, value_dim=5, q_rank=12),
        "latent, plain": R.LatentAttention(48, 6, rank=16, nope_dim=8, rope_dim=0, norm=None),
        "longformer": R.LongformerAttention(48, 6, window=(5, 3), dilation=2, bias=False),
        "bigbird": R.BigBirdAttention(48, 6, block=8, out=False),
        "linformer": R.LinformerAttention(48, 6, E),
        "linformer, shared": R.LinformerAttention(
            48, 6, R.LinformerProjection(64, 16, sharing="key-value"), bias=False
        ),
        "performer": R.PerformerAttention(48, 6, features=20, causal=True),
        "linear": R.LinearAttention(48, 6, kv_heads=3, decay="token", gate=True, bias=True),
        "delta": R.LinearAttention(48, 6, delta=True, decay="head", out_norm=nn.RMSNorm),
    }


@pytest.mark.parametrize("name", modules())
def test_parameters_equal_those_of_the_module(name: str) -> None:
    module = modules()[name]
    layer = from_module(module)
    assert layer.parameters == sum(p.numel() for p in module.parameters())
    assert estimate(layer, 32).parameters == layer.parameters


@native
@pytest.mark.parametrize("name", ["heads", "grouped, plain", "latent, plain"])
def test_saved_bytes_of_a_module(name: str) -> None:
    grouped = regard.nn.Attention(48, 6, kv_heads=2, head_dim=10, value_dim=7)
    module = (modules() | {"grouped, plain": grouped})[name]
    x = torch.randn(3, 65, 48, requires_grad=True)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    layer = from_module(module)
    assert estimate(layer, 65, B=3).saved_bytes == saved_bytes(lambda: module(x), parameters)


@native
@pytest.mark.parametrize("name", ["heads", "grouped", "latent queries", "latent, plain", "cross"])
@pytest.mark.parametrize("absorbed", [False, True])
def test_flops_of_a_module_equal_pytorchs_count(name: str, absorbed: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module, layer = modules()[name], from_module(modules()[name])
    options: dict[str, Any] = {}
    if isinstance(layer, LatentSpec):
        layer, options["absorb"] = replace(layer, absorbed=absorbed), absorbed
    inputs = [torch.randn(2, 33, 48)]
    if name == "cross":
        inputs.append(torch.randn(2, 33, 32))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*inputs, **options)
    layer_cost = estimate(layer, 33, B=2)
    assert counter.get_total_flops() == layer_cost.forward_flops.visible


@native
@pytest.mark.parametrize("name", ["longformer", "bigbird", "linformer", "performer", "linear"])
def test_flops_of_sparse_and_linear_modules(name: str) -> None:
    """Without the projections, each module takes fewer FLOPs than dense attention."""
    layer = from_module(modules()[name])
    layer_cost = estimate(layer, 64)
    dense = 2 * 6 * 64 * 64 * 16
    if name in ("performer", "linear"):
        assert layer_cost.forward == cost.Flops()
        assert layer_cost.products["state readout"] < dense
    else:
        assert 0 < layer_cost.forward.visible < dense


def test_global_tokens_of_a_longformer() -> None:
    """The rows of global tokens are computed twice: in the windows, then over all tokens."""
    is_global = torch.arange(64) < 3
    for dilation in (1, 2):
        layer_cost = estimate(LongformerSpec(48, 6, window=(4, 4), dilation=dilation, globals=3), 64)
        local = M.longformer((4, 4), dilation=dilation).to_dense(64, 64) | is_global
        assert layer_cost.forward.visible == 2 * 16 * 6 * (int(local.sum()) + 3 * 64)
        assert layer_cost.products["global q"] == 2 * 3 * 48 * 48


# Decoding


def test_a_decode_step_reads_the_cache() -> None:
    layer = AttentionSpec(48, 6, 2, 8)
    weights = 48 * (48 + 32) + 48 * 48
    activations = 48 + 48 + 48 + 32  # x, heads, q, the new key and value
    expected = {
        "float32": 100 * 2 * 2 * 8 * 4,
        "int8": 100 * 2 * 2 * 34,
        "int4": 100 * 2 * 2 * 20,
    }
    for kind, cached in expected.items():
        step_cost = estimate(layer, 1, past=100, cache=kind)
        assert step_cost.read_bytes == 4 * (weights + activations) + cached
    windowed = estimate(AttentionSpec(48, 6, 2, 8, window=10, sinks=1), 1, past=100, cache="int8")
    assert windowed.read_bytes == 4 * (weights + activations) + 11 * 2 * 2 * 34


def test_absorbed_decoding_costs_less() -> None:
    expanded, absorbed = (
        estimate(LatentSpec(2048, 16, *DEEPSEEK, mask=M.Causal(), absorbed=a), 1, past=4096)
        for a in (False, True)
    )
    ways = regard.nn.LatentAttention(2048, 16, rank=512, nope_dim=128, rope_dim=64, device="meta").operations(
        1, 4097
    )
    assert expanded.forward_flops.visible - absorbed.forward_flops.visible == ways.expanded - ways.absorbed
    assert absorbed.read_bytes < expanded.read_bytes
    assert absorbed.cache_bytes == expanded.cache_bytes == 4097 * 576 * 4


# Models of Hugging Face


def configs() -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns the model class and a small config of each supported architecture."""
    common = {"vocab_size": 97, "num_hidden_layers": 5, "hidden_size": 48, "num_attention_heads": 6}
    with_mlp = common | {"intermediate_size": 80}
    grouped = with_mlp | {"num_key_value_heads": 2}
    latent = with_mlp | {
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    windowed = {"head_dim": 16, "sliding_window": 8}
    return {
        "llama": ("LlamaForCausalLM", grouped),
        "llama, biases": (
            "LlamaForCausalLM", with_mlp | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
        ),
        "llama, tied": ("LlamaForCausalLM", grouped | {"tie_word_embeddings": True}),
        "mistral": ("MistralForCausalLM", grouped | {"sliding_window": 8}),
        "qwen2": ("Qwen2ForCausalLM", grouped),
        "qwen2, windows": (
            "Qwen2ForCausalLM",
            grouped | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        ),
        "qwen3": ("Qwen3ForCausalLM", grouped | {"head_dim": 16}),
        "gemma2": ("Gemma2ForCausalLM", grouped | windowed),
        "gemma3_text": ("Gemma3ForCausalLM", grouped | windowed | {"num_hidden_layers": 7}),
        "gpt2": (
            "GPT2LMHeadModel", {"vocab_size": 97, "n_layer": 5, "n_embd": 48, "n_head": 6, "n_positions": 31},
        ),
        "opt": ("OPTForCausalLM", common | {"ffn_dim": 80, "max_position_embeddings": 31,
                                           "word_embed_proj_dim": 48}),
        "bert": ("BertModel", with_mlp | {"max_position_embeddings": 31}),
        "deepseek_v2": ("DeepseekV2ForCausalLM", latent),
        "deepseek_v2, plain queries": ("DeepseekV2ForCausalLM", latent | {"q_lora_rank": None}),
        "deepseek_v3": ("DeepseekV3ForCausalLM", latent | {"n_group": 2, "topk_group": 1}),
    }  # fmt: skip


@pytest.mark.parametrize("name", configs())
def test_a_config_gives_the_sizes_of_transformers(name: str, tmp_path: Path) -> None:
    """Parameters and windows equal those of Transformers.

    A config file that Transformers writes gives the same model as the fields.
    """
    transformers = pytest.importorskip("transformers")
    cls, sizes = configs()[name]
    config = getattr(transformers, cls).config_class(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, cls)(config)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    spec = from_config(sizes | {"model_type": name.partition(",")[0]})
    assert spec == from_config(tmp_path) == from_config(tmp_path / "config.json")
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(spec.layers)
    windows = [getattr(config, "sliding_window", None) if k == "sliding_attention" else None for k in kinds]
    if name != "mistral":  # Mistral's config has no layer_types: every layer has a window
        assert [layer.most_kept for layer in spec.layers] == windows
    else:
        assert [layer.most_kept for layer in spec.layers] == [8] * 5


def test_active_experts_of_a_token() -> None:
    model = deepseek(61, 7168, 128)
    experts = model.blocks[-1].feed_forward
    assert experts.parameters - experts.active_parameters == (256 - 8) * 3 * 7168 * 2048
    step_cost = estimate(model, 1)
    assert step_cost.products["feed-forward, down"] == 2 * 7168 * (3 * 8192 + 58 * 9 * 2048)


BASE = {
    "model_type": "llama", "vocab_size": 97, "num_hidden_layers": 2, "hidden_size": 48,
    "num_attention_heads": 6, "intermediate_size": 80,
}  # fmt: skip


GROUPED = {"model_type": "mistral", "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, r"got also num_experts"),
        ({"quantization_config": {"bits": 4}}, r"got also quantization_config"),
        ({"model_type": "mamba"}, r"expected model_type to be one of bert, .* got 'mamba'"),
        ({"hidden_size": None}, r"expected a field 'hidden_size', got none"),
        ({"hidden_size": "48"}, r"expected 'hidden_size' to be an integer of at least 1"),
        ({"num_attention_heads": 0}, r"'num_attention_heads' to be an integer of at least 1, got int 0"),
        ({"num_hidden_layers": 10**12}, r"expected at most 16,384 layers, got num_hidden_layers = 1,000,"),
        ({"sliding_window": 8}, r"expected sliding_window = None, the only supported value, got 8"),
        ({"is_encoder_decoder": True}, r"expected is_encoder_decoder = False"),
        (GROUPED, r"expected a field 'sliding_window', a number or null"),
        ({"model_type": "mistral"}, r"expected a field 'num_key_value_heads'"),
        ({"model_type": "qwen3", "num_key_value_heads": 2}, r"expected a field 'head_dim'"),
        (
            GROUPED | {"sliding_window": 8, "layer_types": ["a", "b"]},
            r"expected layer_types of full_attention and sliding_attention, got 'a'",
        ),
        (
            GROUPED | {"sliding_window": 8, "layer_types": []},
            r"expected 2 layer_types, as num_hidden_layers, got 0",
        ),
        (
            GROUPED | {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            r"expected sliding_window with layers of sliding_attention",
        ),
        (
            GROUPED | {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True},
            r"expected a field 'max_window_layers'",
        ),
    ],
)  # fmt: skip
def test_unsupported_configs_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(BASE | change)


WRONG_SIZES = [-1, -(10**30), 10**9, 10**30, 10**5000, 1.5, 4.0, math.nan, math.inf, "8", "", True, [], {}]
MAY_BE_0 = {"first_k_dense_replace", "max_window_layers", "n_group", "n_shared_experts", "qk_rope_head_dim",
            "topk_group"}  # fmt: skip


@pytest.mark.parametrize("name", configs())
def test_sizes_in_a_config_are_checked(name: str) -> None:
    """Wrong numbers of layers, sizes and heads raise within 0.1 s of CPU time."""
    config = configs()[name][1] | {"model_type": name.partition(",")[0]}
    sizes = [field for field, value in config.items() if type(value) is int]
    assert len(sizes) >= 5
    for field in [*sizes, "num_nextn_predict_layers", "n_ctx"]:
        for wrong in [*WRONG_SIZES, *([0] if field in sizes and field not in MAY_BE_0 else [])]:
            start = time.process_time()
            with pytest.raises(ValueError, match=r"^\w+: expected .*, got "):
                from_config(config | {field: wrong})
            assert time.process_time() - start < 0.1


@pytest.mark.parametrize("types", [2, "full_attention", {"full_attention": 2}])
def test_layer_types_are_a_list(types: Any) -> None:
    with pytest.raises(ValueError, match=r"expected layer_types to be a list, got"):
        from_config(BASE | GROUPED | {"sliding_window": 8, "layer_types": types})


def test_a_malformed_config_file_raises(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="expected an object"):
        from_config(file)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected JSON in .*, got"):
        from_config(file)
    for text in ("[" * 100_000, '{"hidden_size": 1' + 5000 * "0" + "}"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"expected JSON in .*, got"):
            from_config(file)


def test_a_null_field_is_ignored() -> None:
    assert from_config(BASE | {"num_experts": None}) == from_config(BASE)


# Modules, arguments, printing


def test_a_stack_gives_its_layers() -> None:
    block = regard.nn.DecoderBlock(48, 6, kv_heads=2)
    stack = regard.nn.Stack([block, regard.nn.EncoderBlock(48, 6)])
    layers = layers_in(stack)
    assert [layer.kv_values for layer in layers] == [32, 96]
    both = estimate(layers, 32)
    assert both.forward == estimate(layers[0], 32).forward + estimate(layers[1], 32).forward
    assert allocated_bytes(layers, 70, format="float32") == 70 * 4 * 128


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AttentionSpec(50, 6), ValueError, r"d_model: expected a multiple of heads = 6"),
        (lambda: AttentionSpec(48, 6, 4), ValueError, r"kv_heads: expected a divisor of heads = 6, got 4"),
        (lambda: AttentionSpec(48, 0), ValueError, r"heads: expected an integer from 1"),
        (lambda: BigBirdSpec(50, 6), ValueError, r"d_model: expected a multiple"),
        (lambda: CallSpec(Hq=2, Hkv=3).cost(), ValueError, r"heads"),
        (lambda: CallSpec(B=0).cost(), ValueError, r"B: expected an integer from 1"),
        (lambda: CallSpec(D=8, Dv=9, shared=True).cost(), ValueError, r"Dv: expected at most D = 8"),
        (lambda: estimate(BigBirdSpec(48, 6), 8, past=3), ValueError, r"past: expected none for BigBird"),
        (lambda: estimate(LinearSpec(48, 6), 8, mask=M.Causal()), ValueError, r"mask: expected none"),
        (lambda: estimate(PerformerSpec(48, 6), 8, mask=M.Causal()), ValueError, r"mask: expected none for"),
        (lambda: estimate(LinformerSpec(48, 6), 513), ValueError, r"tokens: expected at most max_length"),
        (lambda: estimate(LongformerSpec(48, 6, globals=9), 8), ValueError, r"globals: expected at most"),
        (
            lambda: estimate(LongformerSpec(48, 6, globals=2), 8, mask=M.Causal()),
            ValueError, r"mask: expected Lengths with global tokens",
        ),
        (lambda: CallSpec(Lk=0).cost(), ValueError, r"Lk: expected an integer from 1"),
        (lambda: estimate(SMALL, 0), ValueError, r"tokens: expected an integer from 1"),
        (lambda: cache_bytes(SMALL, 1, format="int3"), ValueError, r"format: expected one of float64"),
        (lambda: allocated_bytes(SMALL, 9, capacity=8), ValueError, r"capacity: expected at"),
        (
            lambda: allocated_bytes(SMALL, 9, capacity=10, page=16),
            ValueError, r"page: expected None with a capacity",
        ),
        (lambda: allocated_bytes(SMALL, 9, page=0), ValueError, r"page: expected an integer"),
        (lambda: from_module(nn.Linear(2, 2)), TypeError, r"module: expected one of Attention, BigBird"),
        (lambda: layers_in(nn.Linear(2, 2)), TypeError, r"model: expected a module with attention"),
        (lambda: from_module(WRONG), TypeError, r"module: expected one of"),
        (lambda: from_module(nn.MultiheadAttention(8, 2, kdim=4)), ValueError, r"kdim = vdim = embed_dim"),
        (
            lambda: from_module(regard.nn.LongformerAttention(8, 2, window=(2, 2), dilation=[1, 2])),
            ValueError, r"one dilation for all heads",
        ),
        (lambda: cost.predict(CallSpec(), MACHINE, WRONG), ValueError, r"passes: expected one of forward"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_packed_documents_narrow_the_mask() -> None:
    layer = AttentionSpec(48, 6, mask=M.Causal())
    documents = M.Documents(torch.arange(60) // 20)
    layer_cost = estimate(layer, 60, mask=documents)
    assert layer_cost.forward.visible == 2 * 16 * 6 * 3 * 20 * 21 // 2
    assert layer_cost.forward.causal == 2 * 16 * 6 * 60 * 61 // 2
    assert layer_cost.forward.halved == layer_cost.forward.dense // 2 == 2 * 16 * 6 * 60 * 60 // 2
    assert estimate(SMALL, 60, mask=documents).forward.visible == 2 * 16 * 6 * 3 * 20 * 20


def test_estimates_print_integers_with_units_and_conventions() -> None:
    layer_cost = estimate(AttentionSpec(48, 6, mask=M.Causal()), 60)
    lines = str(layer_cost).splitlines()
    assert len(lines) == len(layer_cost.rows())
    assert any("half of all pairs (FlashAttention's count)" in line for line in lines)
    assert all(isinstance(row.value, int) and row.convention for row in layer_cost.rows())
    assert len({row.name for row in layer_cost.rows()}) == len(lines)
    data = json.loads(layer_cost.to_json())
    assert data["cost"]["forward"]["dense"] == layer_cost.forward.dense
    assert data["rows"][0] == layer_cost.rows()[0]._asdict()


# Predicted times


@native
def test_seconds_grow_with_work_and_shrink_with_the_machine() -> None:
    short, long = (cost.predict(CallSpec(Hq=8, Lq=L), MACHINE) for L in (512, 1024))
    assert 3.5 < long / short < 4.1
    twice_as_fast = cost.Machine(
        1, 2 * MACHINE.fma, tuple((n, 2 * rate) for n, rate in MACHINE.read), MACHINE.call
    )
    assert cost.predict(CallSpec(Hq=8, Lq=512), twice_as_fast) == pytest.approx(short / 2, rel=0.01)
    call = CallSpec(Hq=8, Lq=512)
    parts = cost.predict(call, MACHINE) + cost.predict(call, MACHINE, "backward")
    assert cost.predict(call, MACHINE, "training") == pytest.approx(parts - MACHINE.call)
    assert cost.predict(CallSpec(Hq=8, Lq=512, dtype=torch.float64), MACHINE) > 1.9 * short


@native
def test_seconds_of_decoding_equal_the_time_to_read() -> None:
    call = CallSpec(Hq=8, Lq=1, Lk=100_000, D=64)
    assert cost.predict(call, MACHINE) == pytest.approx(2 * 8 * 100_000 * 64 * 4 / 1e10, rel=0.01)
    assert MACHINE.call < cost.predict(CallSpec(), MACHINE) < 1.1 * MACHINE.call


@native
def test_seconds_of_decoding_follow_the_kernel() -> None:
    """With few keys and free reads, the prediction depends on the arithmetic alone."""
    free_reads = cost.Machine(1, 1e11, ((1, 1e15),), 0.0)

    def seconds(rows: int, D: int = 128, dtype: torch.dtype = torch.float32) -> float:
        return cost.predict(CallSpec(Hq=rows, Hkv=1, Lk=1024, D=D, dtype=dtype), free_reads)

    assert seconds(2) == pytest.approx(seconds(1), rel=0.1)  # one load of a key serves one or two rows
    assert seconds(4) == pytest.approx(2 * seconds(2))
    P = core.panel_rows()
    assert seconds(P) == pytest.approx(seconds(3 * P // 4), rel=0.05)  # a partial panel costs as a full one
    assert seconds(P) < 1.5 * seconds(P // 2) < seconds(P + 1)  # P: one panel; P / 2: no panel
    assert seconds(32, 64) > 0.5 * seconds(32)  # the softmax does not depend on D
    assert seconds(4, dtype=torch.bfloat16) == pytest.approx(seconds(4))  # converted in registers
    conversion = seconds(P, dtype=torch.bfloat16) - seconds(P)
    assert conversion == pytest.approx(1024 * 6 * 256 / 1e11)
    assert seconds(8, dtype=torch.float64) > 1.1 * seconds(8)
    assert seconds(P) == pytest.approx(1024 * (2 * 256 * P / 0.9 + 70 * P) / 1e11)


@native
def test_threads_share_splits_of_decoding() -> None:
    one, two = (cost.Machine(n, n * 1e11, ((1, 1e15),), 0.0) for n in (1, 2))
    for keys, gain in ((256, 1), (1024, 2), (1536, 1.5), (2048, 2)):
        call = CallSpec(Hq=8, Hkv=1, Lk=keys, D=128)
        assert cost.predict(call, one) / cost.predict(call, two) == pytest.approx(gain), keys


def test_small_data_is_read_at_cache_bandwidth() -> None:
    seconds = [MACHINE.seconds_to_read(2**n) for n in (10, 20, 22, 24, 30)]
    assert [2**n / s for n, s in zip((10, 20, 24, 30), (*seconds[:2], *seconds[3:]), strict=True)] == [
        pytest.approx(rate) for rate in (4e10, 4e10, 1e10, 1e10)
    ]
    assert seconds[2] == pytest.approx(2**22 * (0.5 / 4e10 + 0.5 / 1e10))


@native
def test_seconds_of_a_model() -> None:
    layer, work = AttentionSpec(512, 8), cost.Work(512)
    one = cost.attention_seconds(layer, work, MACHINE)
    assert one == cost.predict(CallSpec(Hq=8, Lq=512), MACHINE)
    assert cost.attention_seconds([layer] * 3, work, MACHINE) == pytest.approx(3 * one)


@native
def test_one_state_is_saved_per_segment_of_the_core() -> None:
    assert SEGMENT == core._core.LINEAR_SEGMENT
    layer = LinearSpec(48, 6, 2, 8, 5)
    short, long = (estimate(layer, L, dtype=torch.bfloat16).saved_bytes for L in (512, 513))
    tokens = 48 + 6 * (8 + 5) + 2 * (8 + 5)
    assert long - short == 2 * tokens + 4 * layer.state


@native
def test_the_machine_is_measured() -> None:
    machine = cost.measure_machine(1, repeats=1, sizes=(2**20, 2**22))
    assert machine.threads == 1
    assert machine.fma > 1e8
    assert [size for size, _ in machine.read] == [2**20, 2**22]
    assert all(rate > 1e8 for _, rate in machine.read)
    assert 0 < machine.call < 0.1


# The command


def run(*arguments: str) -> Any:
    testing = pytest.importorskip("typer.testing")
    from regard.cli._app import app

    return testing.CliRunner().invoke(app, ["cost", *arguments])


def test_the_command_prints_a_table() -> None:
    result = run("--width", "768", "--heads", "12", "--tokens", "1024")
    assert result.exit_code == 0, result.output
    assert "3,623,878,656" in result.output
    assert "FLOP" in result.output


@pytest.mark.parametrize(
    "kind", ["heads", "latent", "absorbed", "longformer", "bigbird", "linformer", "performer", "linear"]
)
def test_the_command_knows_every_kind(kind: str) -> None:
    sizes = LATENT if kind in ("latent", "absorbed") else ()
    result = run("--kind", kind, "--tokens", "64", "--json", *sizes)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["cost"]["parameters"] > 0


def test_the_command_reads_a_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BASE), encoding="utf-8")
    result = run(str(file), "--json", "--tokens", "1", "--past", "63", "--cache", "int8", "--page", "16")
    data = json.loads(result.output)["cost"]
    assert data["parameters"] == from_config(BASE).parameters
    assert data["cache_bytes"] == data["allocated_bytes"] == 2 * 64 * 2 * 6 * 34


@native
def test_the_command_predicts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "measure_machine", lambda: MACHINE)
    result = run("--tokens", "64", "--time")
    assert result.exit_code == 0, result.output
    assert "s forward" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "linear", "--window", "3"], "only with --kind heads"),
        (["--sinks", "3"], "only with --window"),
        (["--kind", "latent"], "--rank, --nope-dim, --rope-dim, --value-dim: expected all four"),
        (LATENT, "only with --kind latent or absorbed"),
        (["--compare", "--window", "3"], "--compare: expected no config, --kind, --window"),
        (["--compare", *LATENT[:3]], "--rank, --nope-dim, --rope-dim, --value-dim: expected all four"),
        (["--dtype", "int3"], "dtype: expected one of float64"),
        (
            ["/nowhere/config.json"],
            "config: expected a file, got /nowhere/config.json, which does not exist\n",
        ),
    ],
)
def test_the_command_reports_wrong_options(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.output


# Side by side

HEADS = {
    "MHA": AttentionSpec(2048, 16, mask=M.Causal()),
    "GQA": AttentionSpec(2048, 16, 4, mask=M.Causal()),
    "MLA": LatentSpec(2048, 16, *DEEPSEEK, mask=M.Causal()),
}


def test_a_latent_has_no_silent_sizes() -> None:
    with pytest.raises(TypeError, match="rank"):
        LatentSpec(2048, 16)  # type: ignore[call-arg]


@native
def test_a_table_has_the_numbers_of_the_estimates() -> None:
    compared = cost.table(HEADS, 512, past=100, B=2, dtype=torch.bfloat16, cache="int8", machine=MACHINE)
    rows = {row.name: row.values for row in compared.rows}
    work = cost.Work(512, 100, 2, torch.bfloat16)
    for column, layer in enumerate(HEADS.values()):
        single = estimate(layer, 512, past=100, B=2, dtype=torch.bfloat16, cache="int8")
        assert rows["parameters, million"][column] == single.parameters / 1e6
        assert rows["forward, GFLOP"][column] == single.forward_flops.executed / 1e9
        assert rows["backward, GFLOP"][column] == single.backward_flops.executed / 1e9
        assert rows["cache, MiB"][column] == single.cache_bytes / MIB
        assert rows["saved for backward, MiB"][column] == single.saved_bytes / MIB
        seconds = cost.attention_seconds(layer, work, MACHINE)
        assert rows["attention forward, ms"][column] == 1e3 * seconds
    assert compared.title == "2 x 512 tokens after 100, bfloat16"


def test_modules_are_taken_as_their_attention_layers() -> None:
    attend = regard.nn.Attention(64, 8, kv_heads=2)
    blocks = regard.nn.Stack([regard.nn.DecoderBlock(64, 8, kv_heads=2) for _ in range(3)])
    spec = cost.from_module(attend)
    compared = [cost.table({"a": x}, 100, machine=MACHINE).rows for x in (attend, spec)]
    assert compared[0] == compared[1]
    assert cost.estimate(attend, 100) == cost.estimate(spec, 100)
    assert cost.cache_bytes(blocks, 100, format="float32") == 3 * 100 * 2 * 2 * 8 * 4
    with pytest.raises(TypeError, match="model: expected a module with attention layers, got Linear"):
        cost.estimate(torch.nn.Linear(2, 2), 100)


@native
def test_a_table_marks_the_smallest() -> None:
    lines = str(cost.table(HEADS | {"again": HEADS["MHA"]}, 8192, machine=MACHINE)).splitlines()
    assert lines[1].split() == ["MHA", "GQA", "MLA", "again"]
    cells = {line.split("  ")[0]: line.split()[-4:] for line in lines[2:-1]}
    assert cells["cache, MiB"] == ["128", "32", "18*", "128"]
    assert [cell.endswith("*") for cell in cells["attention forward, GFLOP"]] == [True, True, False, True]
    assert lines[-1] == "* the smallest of a row"
    assert "*" not in str(cost.table({"one": HEADS["MHA"]}, machine=MACHINE).rows[0].texts())
    with pytest.raises(ValueError, match="specs: expected at least one, got none"):
        cost.table({})


@native
def test_a_table_measures_this_machine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.cost import _table

    calls: list[int] = []
    monkeypatch.setattr(_table, "measure_machine", lambda: calls.append(0) or MACHINE)
    _table._this_machine.cache_clear()
    tables = [cost.table(HEADS, 64) for _ in range(2)]
    _table._this_machine.cache_clear()
    assert str(tables[0]) == str(tables[1]) == str(cost.table(HEADS, 64, machine=MACHINE))
    assert len(calls) == 1


@native
def test_the_command_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.cost import _table

    monkeypatch.setattr(_table, "_this_machine", lambda: MACHINE)
    result = run("--compare", "--width=2048", "--heads=16", "--kv-heads=4", "--tokens=8192", *LATENT)
    assert result.exit_code == 0, result.output
    absorbed = replace(HEADS["MLA"], absorbed=True)
    assert result.output == f"{cost.table(HEADS | {'MLA, absorbed': absorbed}, 8192, machine=MACHINE)}\n"
