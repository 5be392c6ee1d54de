"""Tests of LatentAttention: absorbed and expanded forms, DeepSeek's weights, caches, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import masks as M, packing
from regard.cache import KVCache, LatentCache
from regard.nn import Block, FeedForward, LatentAttention, Stack
from regard.positions import Rotary, YaRN
from support import assert_close, rel_l2

SMALL: dict[str, Any] = {"rank": 11, "nope_dim": 5, "rope_dim": 6, "value_dim": 7, "mask": M.Causal()}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed queries": {"q_rank": 13},
    "biases": {"bias": True, "q_rank": 13, "out_bias": False},
    "no norms": {"norm": None, "bias": True},
    "no rotary": {"rope_dim": 0},
    "rotary alone": {"nope_dim": 0},
    "halves, YaRN": {"position": Rotary(6, scaling=YaRN(4.0, 16, mscale=1.0, mscale_all_dim=0.7))},
    "not causal": {"mask": None},
}
ABSORB = (True, False)


def small(**options: Any) -> LatentAttention:
    return LatentAttention(17, 3, **SMALL | options).eval()


def deepseek(q_rank: int | None, rope: dict[str, Any], interleave: bool = True, bias: bool = False) -> Any:
    """Returns Hugging Face's DeepSeek-V3 attention and its rotary embedding."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=96, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=q_rank, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, rope_interleave=interleave,
        attention_bias=bias, max_position_embeddings=128, rope_parameters={"rope_theta": 10000.0, **rope},
        attn_implementation="sdpa",
    )  # fmt: skip
    return modeling.DeepseekV3Attention(config, 0).eval(), modeling.DeepseekV3RotaryEmbedding(config)


NAMES = {
    "q_proj": "q", "q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up", "o_proj": "out",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
    "mscale_all_dim": 0.8, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], YaRN | None]] = {
    "V3": ({"q_rank": 24, "rope": {"rope_type": "default"}}, None),
    "V2-lite": ({"q_rank": None, "rope": {"rope_type": "default"}}, None),
    "biases, halves": (
        {"q_rank": 24, "rope": {"rope_type": "default"}, "interleave": False, "bias": True},
        None,
    ),
    "YaRN": ({"q_rank": 24, "rope": YARN}, YaRN(4.0, 32, mscale=1.0, mscale_all_dim=0.8)),
}


def twins(case: str) -> tuple[LatentAttention, Any, Any]:
    """Returns our module, Hugging Face's with the same random weights, and its rotary embedding."""
    options, scaling = CASES[case]
    theirs, table = deepseek(**options)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.2) if p.ndim > 1 else nn.init.normal_(p, 1.0, 0.2)
    layout = "interleaved" if options.get("interleave", True) else "half"
    ours = LatentAttention(
        96, 4, rank=32, nope_dim=16, rope_dim=8, value_dim=24, q_rank=options["q_rank"],
        bias=options.get("bias", False), mask=M.Causal(), position=Rotary(8, scaling=scaling, layout=layout),
    ).eval()  # fmt: skip
    state = {}
    for name, value in theirs.state_dict().items():
        layer, kind = name.rsplit(".", 1)
        state[f"{NAMES[layer]}.{kind}"] = value
    ours.load_state_dict(state)
    return ours, theirs, table


def causal(Lq: int, Lk: int) -> Tensor:
    return torch.ones(Lq, Lk, dtype=torch.bool).tril(Lk - Lq)[None, None]


@pytest.mark.parametrize("absorb", ABSORB)
@pytest.mark.parametrize("case", CASES)
def test_forward_matches_deepseek(case: str, absorb: bool) -> None:
    ours, theirs, table = twins(case)
    x = torch.randn(2, 37, 96)
    with torch.no_grad():
        expected, _ = theirs(x, table(x, torch.arange(37)[None]), causal(37, 37))
        assert rel_l2(ours(x, absorb=absorb), expected) < 2e-6


@pytest.mark.parametrize("absorb", ABSORB)
@pytest.mark.parametrize("case", CASES)
def test_decoding_matches_deepseek(case: str, absorb: bool) -> None:
    """Prefill, then one token at a time. Both caches hold the same latents."""
    ours, theirs, table = twins(case)
    from transformers import DynamicCache

    x, their_cache, cache = torch.randn(2, 23, 96), DynamicCache(), ours.new_cache(2)
    with torch.no_grad():
        for begin, end in [(0, 13), *((i, i + 1) for i in range(13, 23))]:
            cos_sin = table(x, torch.arange(begin, end)[None])
            expected, _ = theirs(x[:, begin:end], cos_sin, causal(end - begin, end), their_cache)
            assert rel_l2(ours(x[:, begin:end], cache=cache, absorb=absorb), expected) < 2e-6
    their_latents = their_cache.layers[0].keys[:, 0]
    assert rel_l2(cache.state_dict()["latent"][:, 0, :, :32], their_latents) < 2e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_absorbed_and_expanded_agree(variant: str) -> None:
    module, x = small(**VARIANTS[variant]).double(), torch.randn(2, 19, 17, dtype=torch.float64)
    with torch.no_grad():
        assert rel_l2(module(x, absorb=True), module(x, absorb=False)) < 1e-13


@pytest.mark.parametrize("absorb", ABSORB)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "not causal"])
def test_decoding_matches_one_call(variant: str, absorb: bool) -> None:
    """Decodes chunks of 7, 1, 3 and 2 tokens."""
    module, x = small(**VARIANTS[variant]).double(), torch.randn(2, 13, 17, dtype=torch.float64)
    cache = module.new_cache(2)
    with torch.no_grad():
        outs = [module(chunk, cache=cache, absorb=absorb) for chunk in x.split((7, 1, 3, 2), 1)]
        assert rel_l2(torch.cat(outs, 1), module(x)) < 1e-13


@pytest.mark.parametrize("absorb", ABSORB)
def test_samples_of_different_lengths(absorb: bool) -> None:
    """Padding is not appended. Each sample continues at its length in the cache."""
    module, x = small().double(), torch.randn(3, 9, 17, dtype=torch.float64)
    lengths, cache = torch.tensor([9, 4, 0]), module.new_cache(3)
    with torch.no_grad():
        first = module(x, cache=cache, lengths=lengths, absorb=absorb)
        second = module(x[:, :2], cache=cache, absorb=absorb)
        assert cache.lengths.tolist() == [11, 6, 2]
        for b, n in enumerate(lengths.tolist()):
            alone = module(torch.cat((x[b, :n], x[b, :2]))[None])[0]
            assert_close(first[b, :n], alone[:n], rtol=1e-12, atol=1e-13)
            assert_close(second[b], alone[n:], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("absorb", ABSORB)
def test_decoding_with_a_window(absorb: bool) -> None:
    module, x = small(mask=M.Window(3, 0)).double(), torch.randn(1, 12, 17, dtype=torch.float64)
    cache = module.new_cache(1, capacity=12)
    with torch.no_grad():
        outs = [module(chunk, cache=cache, absorb=absorb) for chunk in x.split(4, 1)]
        assert rel_l2(torch.cat(outs, 1), module(x)) < 1e-13


@pytest.mark.parametrize("absorb", ABSORB)
def test_packed_nested_and_padded(absorb: bool) -> None:
    module = small().double()
    sequences = [torch.randn(n, 17, dtype=torch.float64) for n in (5, 1, 8)]
    with torch.no_grad():
        alone = torch.cat([module(sequence[None], absorb=absorb)[0] for sequence in sequences])
        packed = module(torch.cat(sequences), cu_seqlens=packing.cu_seqlens([5, 1, 8]), absorb=absorb)
        nested = module(torch.nested.nested_tensor(sequences, layout=torch.jagged), absorb=absorb)
        padded = module(
            nn.utils.rnn.pad_sequence(sequences, batch_first=True),
            lengths=torch.tensor([5, 1, 8]),
            absorb=absorb,
        )
    for out in (packed, nested.values(), torch.cat([padded[0, :5], padded[1, :1], padded[2]])):
        assert rel_l2(out, alone) < 1e-13


@pytest.mark.parametrize("absorb", ABSORB)
@pytest.mark.parametrize("variant", ["plain", "compressed queries", "no norms"])
def test_gradients(variant: str, absorb: bool) -> None:
    """Checks the gradients of x and of every parameter against finite differences."""
    module = small(**VARIANTS[variant]).double()
    names, parameters = zip(*module.named_parameters(), strict=True)
    x = torch.randn(1, 4, 17, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(names, values, strict=True))
        out: Tensor = torch.func.functional_call(module, state, (x,), {"absorb": absorb})
        return out

    assert torch.autograd.gradcheck(call, (x, *parameters), fast_mode=True)


def test_dropout_is_the_same_in_both_forms() -> None:
    """One seed gives one dropout pattern in both forms."""
    module, x = small(dropout=0.3).train().double(), torch.randn(2, 9, 17, dtype=torch.float64)
    outs = []
    for absorb in ABSORB:
        torch.manual_seed(5)
        outs.append(module(x, absorb=absorb))
    assert rel_l2(*outs) < 1e-13
    assert rel_l2(outs[0], module.eval()(x)) > 0.05


@pytest.mark.parametrize("absorb", ABSORB)
def test_compiled_mapped_and_autocast(absorb: bool) -> None:
    module, x = small(norm=None), torch.randn(2, 9, 17)
    expected = module(x, absorb=absorb)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert rel_l2(compiled(x, absorb=absorb), expected) < 1e-6
    assert rel_l2(torch.vmap(lambda sample: module(sample, absorb=absorb))(x), expected) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, absorb=absorb)
    assert out.dtype == torch.bfloat16
    assert rel_l2(out, expected) < 2e-2


def test_the_form_with_fewer_operations_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = small(rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    assert module.operations(5, 7) == (
        2 * 3 * (5 * 32 * 32 + 35 * (2 * 32 + 8)),
        2 * 3 * (7 * 32 * 32 + 35 * (16 + 8 + 16)),
    )
    absorb_flags = []
    original = LatentAttention._qkv
    monkeypatch.setattr(
        LatentAttention, "_qkv", lambda *args: absorb_flags.append(args[3]) or original(*args)
    )
    cache = module.new_cache(1)
    with torch.no_grad():
        module(torch.randn(1, 40, 17), cache=cache)
        assert absorb_flags == [False]
        module(torch.randn(1, 1, 17), cache=cache)
        assert absorb_flags == [False]  # absorbed: the cache computes attention without _qkv
    operations = {L: module.operations(L, 8192 + L) for L in range(1, 64)}
    assert [L for L, counts in operations.items() if counts.absorbed < counts.expanded] == list(
        range(1, 32)  # L < rank (nope + v) / (2 rank - nope - v)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes(dtype: torch.dtype) -> None:
    """Each token takes exactly rank + rope numbers."""
    module = LatentAttention(64, 4, rank=512, nope_dim=16, rope_dim=64, dtype=dtype).eval()
    cache = module.new_cache(3, capacity=10)
    with torch.no_grad():
        module(torch.randn(3, 10, 64, dtype=dtype), cache=cache)
    assert cache.nbytes == 3 * 10 * (512 + 64) * dtype.itemsize


def test_in_a_stack() -> None:
    stack = Stack([Block(small(), FeedForward(17)) for _ in range(2)]).double()
    x = torch.randn(2, 6, 17, dtype=torch.float64)
    caches = stack.new_caches(2)
    with torch.no_grad():
        steps = [stack(chunk, caches=caches) for chunk in x.split(2, 1)]
        assert rel_l2(torch.cat(steps, 1), stack(x)) < 1e-13


def test_a_failed_call_leaves_the_cache_unchanged() -> None:
    module, x = small(), torch.randn(1, 4, 17)
    cache = module.new_cache(1)
    with torch.no_grad():
        module(x, cache=cache)
        for absorb in ABSORB:
            with pytest.raises(ValueError, match="broadcastable"):
                module(x, cache=cache, absorb=absorb, mask=torch.ones(3, 3, dtype=torch.bool))
            assert len(cache) == 4


CU = torch.tensor([0, 3])
NESTED = torch.nested.nested_tensor([torch.randn(3, 17)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(torch.randn(2, 3, 16)), ValueError, r"x: expected \(..., L, d_model = 17\), got"),
        (lambda m: m(torch.randn(1, 3, 17), cache=KVCache(1, 3, 11)), TypeError, "expected a LatentCache"),
        (lambda m: m(torch.randn(1, 3, 17), cache=LatentCache(1, 11, 8)), ValueError, "got rank=11, rope=8"),
        (lambda m: m.train()(torch.randn(1, 3, 17), cache=m.new_cache(1)), ValueError, "call eval"),
        (lambda m: m(torch.randn(1, 3, 17), cache=m.new_cache(1)), RuntimeError, "a cache keeps no gradient"),
        (lambda m: m.load_state_dict({}), RuntimeError, "nothing was loaded; expected also kv_down.weight"),
        (lambda m: small(rope_dim=0)(torch.randn(3, 17), positions=3), ValueError, "rope_dim = 0"),
        (lambda m: m(torch.randn(3, 17), cu_seqlens=CU, lengths=CU), ValueError, "lengths: expected None"),
        (lambda m: m(torch.randn(1, 3, 17), cu_seqlens=CU), ValueError, "expected packed tokens"),
        (lambda m: m(NESTED, cache=m.new_cache(1)), ValueError, "cache: expected None with nested"),
        (lambda m: small(position=Rotary(8)), ValueError, "expected a Rotary of rope_dim = 6"),
        (lambda m: small(nope_dim=0, rope_dim=0), ValueError, "at least one channel"),
        (lambda m: small(dropout=2.0), ValueError, "dropout: expected a probability"),
        (lambda m: small(mask="causal"), TypeError, "mask: expected a Mask"),
        (lambda m: m(None), TypeError, "x: expected a tensor, got NoneType None"),
        (lambda m: m(torch.randn(1, 3, 17), absorb="yes"), TypeError, "absorb: expected a bool or None"),
        (lambda m: m.arguments(torch.randn(3, 16)), ValueError, r"x: expected \(..., L, d_model = 17\)"),
    ],
)  # fmt: skip
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(small(dropout=0.1))
