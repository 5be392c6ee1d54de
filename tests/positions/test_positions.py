"""Tests of positions: formulas, agreement with Hugging Face, gradients and error messages."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from regard import packing, positions, scores
from regard.positions import (  # fmt: skip
    NTK,
    Frequencies,
    LinearScaling,
    Llama3,
    Rotary,
    Scaling,
    YaRN,
    _rotary,
    frequencies,
    rotary_table,
    rotate,
)
from support import assert_close, rel_l2

# PyTorch itself emits this warning while it compiles or transforms.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
LAYOUTS = ("half", "interleaved")


# Added embeddings


def test_sinusoidal_matches_the_formula() -> None:
    table = positions.sinusoidal(torch.arange(3, 14), 6)
    for row, position in enumerate(range(3, 14)):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert table[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoidal_module_adds_the_table() -> None:
    x = torch.randn(2, 5, 6)
    module = positions.Sinusoidal(6)
    assert_close(module(x, 7), x + positions.sinusoidal(torch.arange(7, 12), 6))
    position_ids = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    assert_close(module(x, position_ids), x + positions.sinusoidal(position_ids, 6))
    assert module(x.bfloat16()).dtype is torch.bfloat16
    assert not list(module.parameters())


def test_learned_positions() -> None:
    module = positions.Learned(13, 6)
    x = torch.randn(2, 5, 6)
    assert torch.equal(module(x, 3), x + module.weight[3:8])
    position_ids = torch.tensor([[0, 1, 2, 3, 4], [12, 8, 7, 6, 5]])
    assert torch.equal(module(x, position_ids), x + module.weight[position_ids])
    module(x, 3).sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad.sum(1) != 0, (torch.arange(13) >= 3) & (torch.arange(13) < 8))


@pytest.mark.parametrize("module", [positions.Sinusoidal(6), positions.Learned(9, 6)])
def test_wrong_token_width(module: Any) -> None:
    for width in (1, 4):  # width 1 would broadcast
        with pytest.raises(ValueError, match=r"x: expected \(..., L, d_model = 6\)"):
            module(torch.randn(2, 3, width))


def test_learned_positions_beyond_the_table() -> None:
    module = positions.Learned(13, 6)
    with pytest.raises(ValueError, match="positions: expected 0 to 12, got 9 to 13"):
        module(torch.randn(5, 6), 9)
    with pytest.raises(ValueError, match="got -1 to"):
        module(torch.randn(5, 6), torch.arange(-1, 4))


# Frequencies


def hf_frequencies(dims: int, base: float, **rope: Any) -> tuple[Tensor, float]:
    """Returns `inv_freq` and the attention factor of a Hugging Face Llama."""
    pytest.importorskip("transformers")
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * dims, num_attention_heads=4, head_dim=dims, max_position_embeddings=64,
        rope_parameters={"rope_theta": base, **rope},
    )  # fmt: skip
    module: Any = LlamaRotaryEmbedding(config)
    return module.inv_freq, module.attention_scaling


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, tuple[Scaling | None, dict[str, Any]]] = {
    "default": (None, {"rope_type": "default"}),
    "linear": (LinearScaling(3.0), {"rope_type": "linear", "factor": 3.0}),
    "yarn": (YaRN(4.0, 64), YARN),
    "yarn-betas": (
        YaRN(4.0, 64, beta_fast=16, beta_slow=2, truncate=False),
        YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    ),
    "yarn-mscale": (
        YaRN(4.0, 64, mscale=0.7, mscale_all_dim=0.4),
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    ),
    "yarn-factor": (YaRN(4.0, 64, attention_factor=1.5), YARN | {"attention_factor": 1.5}),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, 64),
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_match_hugging_face(name: str) -> None:
    scaling, rope = SCALINGS[name]
    for dims, base in ((16, 10000.0), (64, 500000.0)):
        expected, factor = hf_frequencies(dims, base, **rope)
        inv_freq, gain = frequencies(dims, base, scaling)
        assert torch.equal(inv_freq, expected)
        assert gain == pytest.approx(factor, rel=1e-12)


def test_explicit_frequencies() -> None:
    inv_freq, gain = frequencies(16, 10000.0, YaRN(4.0, 64))
    scaling = Frequencies(inv_freq.tolist(), gain)
    x = torch.randn(2, 5, 16)
    assert torch.equal(Rotary(16, scaling=scaling)(x, 3), Rotary(16, scaling=YaRN(4.0, 64))(x, 3))
    assert scaling == Frequencies(tuple(inv_freq.tolist()), gain)
    assert hash(scaling) == hash(pickle.loads(pickle.dumps(scaling)))
    assert "Frequencies(8 pairs" in repr(Rotary(16, scaling=scaling))
    with pytest.raises(ValueError, match="dims: expected 16 for 8 frequencies, got 18"):
        Rotary(18, scaling=scaling)
    with pytest.raises(ValueError, match="values: expected finite frequencies"):
        Frequencies((1.0, torch.inf))


def test_growth_matches_deepseek() -> None:
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    for factor, mscale in ((4.0, 1.0), (40.0, 0.707), (1.0, 1.0)):
        assert YaRN(factor, 64).growth(mscale) == pytest.approx(yarn_get_mscale(factor, mscale), rel=1e-12)


def test_dynamic_ntk_at_a_fixed_length() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=rope
    )
    for length in (64, 65, 200):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
        assert torch.equal(frequencies(16, 10000.0, NTK(2.0 * length / 64 - 1.0))[0], expected)


def test_ntk_stretches_the_slowest_pair_by_its_factor() -> None:
    unscaled, _ = frequencies(32)
    scaled, _ = frequencies(32, scaling=NTK(4.0))
    assert scaled[0] == unscaled[0]
    assert scaled[-1].item() == pytest.approx(unscaled[-1].item() / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: frequencies(7), "dims: expected an even number"),
        (lambda: frequencies(8, 0.5), "base: expected a number above 1, got 0.5"),
        (lambda: frequencies(8, "10000"), "base: expected a number, got str '10000'"),
        (lambda: LinearScaling("4"), "factor: expected a number, got str '4'"),
        (
            lambda: frequencies(8, scaling="yarn"),
            "scaling: expected LinearScaling, NTK, YaRN, Llama3 or Frequencies, got 'yarn'",
        ),
        (lambda: LinearScaling(0.5), "factor: expected a number >= 1, got 0.5"),
        (lambda: frequencies(2, scaling=NTK(2.0)), "dims: expected at least 4"),
        (lambda: Llama3(8.0, 4.0, 1.0), "low_freq_factor and high_freq_factor"),
        (lambda: YaRN(4.0, 64, beta_slow=0.0), "beta_slow and beta_fast: expected 0 < slow <= fast"),
        (lambda: Rotary(8, layout="pairs"), "layout: expected one of"),
    ],
)
def test_wrong_frequencies(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# Rotation


def complex_rotation(x: Tensor, position_ids: Tensor, dims: int, layout: str) -> Tensor:
    """Rotates x in float64: pair (a, b) is the complex number a + ib, multiplied by e^(i angle)."""
    out = x.double().clone()
    a, b = (slice(0, dims // 2), slice(dims // 2, dims)) if layout == "half" else (
        slice(0, dims, 2), slice(1, dims, 2))  # fmt: skip
    angle = position_ids.double()[..., None] * frequencies(dims)[0].double()
    rotated = torch.complex(out[..., a], out[..., b]) * torch.polar(torch.ones_like(angle), angle)
    out[..., a], out[..., b] = rotated.real, rotated.imag
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [2, 8, 14])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_matches_a_complex_product(poison: None, layout: str, dims: int, dtype: torch.dtype) -> None:
    rotary = Rotary(dims, layout=layout)
    x = torch.randn(2, 11, 3, 14).to(dtype).transpose(1, 2)  # (B, H, L, D), strided
    before = x.clone()
    expected = complex_rotation(x, torch.arange(5, 16), dims, layout)
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    out = rotary(x, 5)
    assert out.dtype is dtype
    assert out.stride() == x.stride()
    assert rel_l2(out, expected) < limit
    assert torch.equal(x, before)
    with torch.no_grad():
        assert rotary(x, 5, inplace=True) is x
    assert rel_l2(x, expected) < limit


def test_positions_in_every_form() -> None:
    rotary, x = Rotary(8), torch.randn(2, 3, 5, 8)
    out = rotary(x, 4)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert torch.equal(rotary(x, torch.arange(4, 9, dtype=dtype)), out)
    position_ids = torch.stack((torch.arange(4, 9), torch.arange(90, 95)))
    batched = rotary(x, position_ids)
    assert torch.equal(batched[0], out[0])
    assert torch.equal(batched[1], rotary(x[1], 90))
    cu_seqlens = packing.cu_seqlens([2, 3])
    packed = rotary(x[0], packing.positions(cu_seqlens))
    assert torch.equal(packed[:, 2:], rotary(x[0, :, 2:], 0))
    assert_close(rotary(x, -3), rotary(x, torch.arange(-3, 2)))


def test_scores_depend_only_on_the_distance() -> None:
    rotary = Rotary(16)
    q, k = torch.randn(2, 1, 16).double()
    near, far = (rotary(q[None], 3 + d) @ rotary(k[None], d).mT for d in (0, 1000))
    assert_close(near, far, rtol=1e-6)


def test_rotations_match_hugging_face() -> None:
    pytest.importorskip("transformers")
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as interleaved
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half

    q, k = torch.randn(2, 2, 3, 7, 16)
    cos, sin = rotary_table(torch.arange(7), frequencies(16)[0])
    cos_sin = [torch.cat((t, t), -1)[None] for t in (cos, sin)]
    for x, expected in zip((q, k), half(q, k, *cos_sin), strict=True):
        assert rel_l2(rotate(x, cos, sin), expected) < 1e-6
    expected = interleaved(q.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    assert rel_l2(rotate(q, cos, sin, layout="interleaved"), expected) < 1e-6


def test_attention_factor_scales_the_result() -> None:
    x, scaling = torch.randn(7, 8), YaRN(4.0, 64)
    unscaled = Rotary(8, scaling=YaRN(4.0, 64, attention_factor=1.0))
    assert_close(Rotary(8, scaling=scaling)(x), unscaled(x) * scaling.gain())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives_of_rotation(layout: str) -> None:
    x = torch.randn(2, 5, 10, dtype=torch.float64, requires_grad=True)
    rotary = Rotary(6, layout=layout)
    assert gradcheck(lambda x: rotary(x, 3), x, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda x: rotary(x, 3).square(), x)
    dx = torch.func.grad(lambda x: rotary(x, 3).pow(3).sum())(x.detach())
    (expected,) = torch.autograd.grad(rotary(x, 3).pow(3).sum(), x)
    assert_close(dx, expected)
    mapped = torch.func.vmap(lambda x: rotary(x, 3))(x.detach())
    assert_close(mapped, rotary(x.detach(), 3))


def test_rotation_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    rotary, x = Rotary(8), torch.randn(2, 3, 5, 12, requires_grad=True)
    compiled = torch.compile(lambda x: rotary(x, 4), fullgraph=True, backend="aot_eager")
    out = compiled(x)
    assert_close(out, rotary(x, 4))
    grads = [torch.autograd.grad(y.pow(3).sum(), x)[0] for y in (out, rotary(x, 4))]
    assert_close(*grads)


PEAK = """
import torch
from regard.cost import peak_memory
from regard.positions import Rotary
x = torch.ones(1, 16, 4096, 64, requires_grad=True)
for layout in ("half", "interleaved"):
    rotary, grad = Rotary(64, layout=layout), torch.ones(1, 16, 4096, 64)
    out = rotary(x)
    calls = (
        lambda: rotary(x),
        lambda: torch.autograd.grad(out, x, grad, retain_graph=True),
        lambda: rotary(grad, inplace=True),
    )
    for call in calls:
        first, peak = peak_memory(call), peak_memory(call)  # the first also counts code that is loaded
        if peak is not None:
            print(peak / x.nbytes)
"""


def test_rotation_allocates_only_its_result() -> None:
    """Peak memory in units of x: 1 in forward, 1 in backward, 0.5 in place."""
    command = [sys.executable, "-c", PEAK]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = [float(line) for line in process.stdout.split()]
    if not peaks:
        pytest.skip("this system does not reset the high-water mark")
    for peak, expected in zip(peaks, (1.0, 1.0, 0.5) * 2, strict=True):
        assert expected * 0.95 < peak < expected + 0.07


def test_in_place_rejects_inputs_that_require_grad() -> None:
    with pytest.raises(ValueError, match="inplace: expected an x that does not require grad"):
        Rotary(8)(torch.randn(5, 8, requires_grad=True), inplace=True)


def test_table_built_in_inference_mode_supports_training() -> None:
    rotary, x = Rotary(8), torch.randn(5, 8)
    with torch.inference_mode():
        rotary(x)
    y = x.clone().requires_grad_()
    rotary(y).sum().backward()
    assert y.grad is not None


def test_growing_the_table_keeps_its_values() -> None:
    rotary, x = Rotary(8), torch.randn(40, 8)
    short = rotary(x[:3])
    assert torch.equal(rotary(x)[:3], short)
    assert torch.equal(rotary(x[:3]), short)
    assert torch.equal(rotary(x[7:9], 7), rotary(x)[7:9])


def test_moving_the_module_keeps_full_precision() -> None:
    rotary = Rotary(8)
    moved = copy.deepcopy(rotary).bfloat16().to("meta")
    assert torch.equal(moved.inv_freq, rotary.inv_freq)
    unpickled = pickle.loads(pickle.dumps(rotary))
    x = torch.randn(5, 8)
    assert torch.equal(unpickled(x, 3), rotary(x, 3))
    with torch.device("meta"):
        assert Rotary(8).inv_freq.device.type == "cpu"
    assert "Rotary(8, base=10000, layout='half')" in repr(rotary)


@pytest.mark.parametrize(
    ("position_ids", "error", "message"),
    [
        (torch.arange(4), ValueError, "positions: expected an int or integers of shape"),
        (torch.arange(5.0), ValueError, "positions: .*float32 tensor"),
        (2.5, TypeError, "positions: expected an int or an integer tensor, got float 2.5"),
        (
            torch.zeros(2, 5, dtype=torch.long),
            ValueError,
            "positions: expected leading dims broadcastable to x",
        ),
    ],
)
def test_wrong_positions(position_ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Rotary(8)(torch.randn(3, 5, 8), position_ids)


def test_rotate_rejects_mismatched_tables() -> None:
    cos, sin = rotary_table(torch.arange(5), frequencies(8)[0])
    with pytest.raises(ValueError, match="cos and sin: expected"):
        rotate(torch.randn(5, 6), cos, sin)
    with pytest.raises(ValueError, match="cos and sin: expected"):
        rotate(torch.randn(4, 8), cos, sin)
    with pytest.raises(ValueError, match="x: expected a float tensor"):
        rotate(torch.ones(5, 8, dtype=torch.long), cos, sin)


# Far positions


FAR = (100_000, 1_000_003, 4_000_000, 2**31 + 7)


def exact_table(position_ids: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin in float64, computed by Python."""
    angles = [[int(p) * turn for turn in turns.tolist()] for p in position_ids.flatten()]
    shape = (*position_ids.shape, len(turns))
    cos, sin = ([[f(a) for a in row] for row in angles] for f in (math.cos, math.sin))
    return torch.tensor(cos, dtype=torch.float64).view(shape), torch.tensor(sin, dtype=torch.float64).view(
        shape
    )


@pytest.mark.parametrize("first", FAR)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_angles_of_far_positions_are_exact(first: int, dtype: torch.dtype) -> None:
    rotary, x = Rotary(16), torch.zeros(3, 5, 16, dtype=dtype)
    position_ids = torch.arange(first, first + 5)
    limit = 1e-7 if dtype is torch.float32 else 1e-13
    for table in (rotary.table(x, first), rotary.table(x, position_ids)):
        for values, expected in zip(table, exact_table(position_ids, rotary.inv_freq), strict=True):
            assert values.dtype is dtype
            assert (values - expected).abs().max() < limit
    waves = positions.sinusoidal(position_ids, 16)
    expected = torch.stack(exact_table(position_ids, frequencies(16)[0])[::-1], -1).flatten(-2)
    assert (waves - expected).abs().max() < 1e-7


def test_scores_of_far_positions_depend_only_on_the_distance() -> None:
    rotary = Rotary(16)
    q, k = torch.randn(2, 1, 16)
    near, far = (rotary(q[None], 3 + d) @ rotary(k[None], d).mT for d in (0, 4_000_000))
    assert_close(near, far, rtol=1e-5, atol=1e-5)


def test_positions_as_int_and_as_tensor_agree_around_the_cached_tables() -> None:
    rotary, x = Rotary(8), torch.randn(40, 8)
    border = _rotary.NEAR
    starts = (0, 1, 63, border - 41, border - 40, border - 3, border, border + 63, 2 * border, border + 60, 5)
    for start in starts:
        for L in (0, 1, 2, 40):
            assert torch.equal(rotary(x[:L], start), rotary(x[:L], torch.arange(start, start + L)))
    long = torch.randn(border + 5, 8)
    assert torch.equal(rotary(long, 3), rotary(long, torch.arange(3, border + 8)))


PEAK_FAR = """
import torch
from regard.cost import peak_memory
from regard.positions import Rotary
rotary, x = Rotary(64), torch.ones(1, 1, 64)
rotary(x)
def stream():
    for position in range(0, 3_000_000, 1009):
        rotary(x, position)
for call in (lambda: rotary(x, 4_000_000), stream):
    peak = peak_memory(call)
    if peak is not None:
        print(peak)
"""


def test_memory_does_not_grow_with_the_position() -> None:
    """Peak memory of one token far away, and of a long stream of tokens."""
    process = subprocess.run([sys.executable, "-c", PEAK_FAR], capture_output=True, text=True, check=True)
    peaks = [int(line) for line in process.stdout.split()]
    if not peaks:
        pytest.skip("this system does not reset the high-water mark")
    assert peaks[0] < 2**22
    assert peaks[1] < 2**26


def test_rotation_is_exported() -> None:
    rotary, x = Rotary(8), torch.randn(2, 3, 5, 12)
    position_ids = torch.arange(1_000_000, 1_000_005)
    exported = torch.export.export(rotary, (x, position_ids)).module()
    assert_close(exported(x, position_ids + 7), rotary(x, position_ids + 7))
    assert_close(exported(x, position_ids + 7), rotary(x, 1_000_007))


# Biases


def test_alibi_module() -> None:
    module = positions.AlibiBias(6)
    assert module() == scores.Alibi.standard(6)
    assert torch.equal(positions.alibi_slopes(6), scores.Alibi.standard(6).slopes)
    assert not module.state_dict()
    learned = positions.AlibiBias(6, learned=True)
    assert [name for name, _ in learned.named_parameters()] == ["slopes"]


def test_relative_module() -> None:
    module = positions.Relative(3, num_buckets=8, max_distance=20, bidirectional=False)
    expected = scores.RelativeBias(module.table, bidirectional=False, max_distance=20)
    assert module() == expected
    assert module.table.shape == (8, 3)
    with pytest.raises(ValueError, match="expected an even number of buckets >= 4"):
        positions.Relative(3, num_buckets=7)
