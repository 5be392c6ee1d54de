"""Products of pairs of bfloat16 numbers: the vector operations, accuracy, and which calls use them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import info, masks as M
from regard._backends.native import core
from support import HAVE_CORE, ROOT, rel_l2
from support.backward import training
from support.forward import Call
from support.options import NAMES, make, options_of

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

PAIRS = core.PAIRS
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c"
BUILDS = {"generic": "-DREGARD_LANES=4", "wide": "-DREGARD_LANES=16", "avx512bf16": AVX512}
LIMIT = 1.1  # of PyTorch's error
SHAPES = [(1, 8, 256, 64), (2, 4, 300, 128), (1, 12, 129, 40), (4, 4, 97, 80)]  # B, H, L, D


@pytest.fixture
def pairs(isa: str) -> str:
    """An instruction set that multiplies pairs."""
    if core.products(torch.bfloat16) != PAIRS:
        pytest.skip("multiplies bfloat16 as float32")
    return isa


# Vector operations


def vector_results(name: str, folder: Path) -> bytes:
    """Compiles and runs support/pairs.cpp, which compares each operation with its definition."""
    program = folder / name
    flags = [
        "-std=c++17",
        "-O2",
        "-ffp-contract=off",
        "-Wno-psabi",
        "-DREGARD_ISA=test",
        *BUILDS[name].split(),
    ]
    source = ROOT / "tests/support/pairs.cpp"
    subprocess.run(["c++", *flags, "-I", ROOT / "native", source, "-o", program], check=True)
    return subprocess.run([program], check=True, capture_output=True).stdout


@pytest.mark.parametrize("name", ["generic", "wide"])
def test_vector_operations_equal_their_definitions(name: str, tmp_path: Path) -> None:
    assert vector_results(name, tmp_path)


@pytest.mark.skipif("avx512bf16" not in core.isas(), reason="the CPU has no AVX-512 BF16")
def test_emulation_has_the_bits_of_the_instructions(tmp_path: Path) -> None:
    assert vector_results("avx512bf16", tmp_path) == vector_results("wide", tmp_path)


# Accuracy


def rows(B: int, H: int, L: int, D: int, count: int = 4) -> list[Tensor]:
    return [torch.randn(B, H, L, D).bfloat16() for _ in range(count)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_error_against_pytorch(pairs: str, shape: tuple[int, int, int, int], causal: bool) -> None:
    q, k, v, _ = rows(*shape)
    want = scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=causal)
    pytorch = rel_l2(scaled_dot_product_attention(q, k, v, is_causal=causal), want)
    got = regard.attention(q, k, v, mask=M.Causal() if causal else None, impl="native")
    assert rel_l2(got, want) <= LIMIT * pytorch


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_errors_against_pytorch(pairs: str, shape: tuple[int, int, int, int], causal: bool) -> None:
    q, k, v, dout = rows(*shape)

    def gradients(attention: object, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        assert callable(attention)
        return torch.autograd.grad(attention(*leaves), leaves, dout.to(inputs[0].dtype))

    def pytorch(*leaves: Tensor) -> Tensor:
        return scaled_dot_product_attention(*leaves, is_causal=causal)

    def native(*leaves: Tensor) -> Tensor:
        return regard.attention(*leaves, mask=M.Causal() if causal else None, impl="native")

    wanted = gradients(pytorch, *(x.double() for x in (q, k, v)))
    for got, other, want in zip(gradients(native, q, k, v), gradients(pytorch, q, k, v), wanted, strict=True):
        assert rel_l2(got, want) <= LIMIT * rel_l2(other, want)


@pytest.mark.parametrize("factor", [1, 8])
def test_lse_is_as_exact_as_in_float32(pairs: str, factor: float) -> None:
    q, k, v, _ = rows(1, 2, 200, 64)
    q = q * factor
    _, lse = regard.attention(q, k, v, return_lse=True, impl="native")
    want = torch.logsumexp(q.double() @ k.double().mT / 8, -1)
    assert (lse - want).abs().max() <= 2e-6 * want.abs().max().clamp(min=1)


def test_a_single_key_is_copied(pairs: str) -> None:
    """A row's output is divided by the sum of its rounded weights, so one value passes unchanged."""
    q, k, v, _ = rows(2, 3, 40, 24)
    got = regard.attention(q, k, v, mask=M.Window(0, 0), impl="native")
    assert torch.equal(got, v)


# Layouts


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Copies of a tensor: rows of whole words, rows that begin between words, other strides."""
    B, H, L, D = x.shape

    def wide(more: int) -> Tensor:
        return torch.zeros(B, H, L, D + more, dtype=x.dtype)

    views = {
        "heads inside": torch.zeros(B, L, H, D, dtype=x.dtype).transpose(1, 2),
        "words": wide(6)[..., 2 : 2 + D],
        "between words": wide(6)[..., 3 : 3 + D],
        "odd rows": wide(5)[..., :D],
        "columns outside": torch.zeros(B, H, D, L, dtype=x.dtype).mT,
        "every second column": torch.zeros(B, H, L, 2 * D, dtype=x.dtype)[..., ::2],
    }
    return {name: view.copy_(x) for name, view in views.items()}


@pytest.mark.parametrize("D", [1, 7, 64, 66])
def test_layouts_have_equal_bits(pairs: str, D: int) -> None:
    """Keys are read in place if their rows are whole words, otherwise copied."""
    t = training(make(pairs, 2, 4, 2, 70, 110, D, D, dtype=torch.bfloat16, mask=M.Window(50, 3)))
    out, lse = t.call.run()
    grads = t.run()
    others = [layouts(x) for x in t.call[:3]]
    for name in others[0]:
        moved = t._replace(call=t.call._replace(q=others[0][name], k=others[1][name], v=others[2][name]))
        again = moved.call.run()
        assert torch.equal(again[0], out), name
        assert torch.equal(again[1], lse), name
        assert all(torch.equal(x, grads[n]) for n, x in moved.run().items()), name


@pytest.mark.parametrize("left", [1, 2, 33, 95, 96])
def test_windows_begin_at_odd_and_even_keys(pairs: str, left: int) -> None:
    q, k, v, _ = rows(1, 2, 390, 16)
    got = regard.attention(q, k, v, mask=M.Window(left, 0), impl="native")
    want = regard.attention(*(x.double() for x in (q, k, v)), mask=M.Window(left, 0), impl="reference")
    assert rel_l2(got, want) < 4e-3


def test_denormal_inputs_count_as_zero(pairs: str) -> None:
    q, k, v, _ = rows(1, 1, 40, 32)
    tiny = torch.full_like(v, 1e-39)
    assert (tiny != 0).all()
    assert (regard.attention(q, k, tiny, impl="native") == 0).all()
    uniform = regard.attention(q, tiny, v, impl="native")
    assert torch.equal(uniform, regard.attention(q, torch.zeros_like(k), v, impl="native"))


@pytest.mark.skipif("avx512bf16" not in core.isas(), reason="the CPU has no AVX-512 BF16")
@pytest.mark.parametrize("name", NAMES)
def test_emulated_kernels_agree(name: str) -> None:
    """Results differ by the rounding of other operations only, which fma changes."""
    call = make("wide", 2, 4, 2, 65, 97, 40, 24, dtype=torch.bfloat16, **options_of(4, 65, 97)[name])
    t = training(call)
    hardware = t._replace(call=call._replace(isa="avx512bf16"))
    assert rel_l2(call.run()[0], hardware.call.run()[0]) < 2e-4
    for n, x in t.run().items():
        assert rel_l2(x, hardware.run()[n]) < 2e-3, n


# Selection


def test_float32_kernels_of_the_same_cpu_do_not_use_pairs() -> None:
    for isa in core.isas():
        with core.use_isa(isa):
            assert (core.products(torch.bfloat16) == PAIRS) == (isa in ("wide", "avx512bf16"))
            assert core.products(torch.float32) == "float32"
            assert core.products(torch.float64) == "float64"


def test_reasons_name_every_other_instruction_set() -> None:
    report = info.report()
    others = set(core.objections())
    assert others == set(report["native compiled"].split(", ")) - {report["native isa"]}
    assert core.objections().get("wide", "only tests use it") == "only tests use it"
    for isa in others - set(core.isas()):
        assert core.objections()[isa] == "the CPU does not support it"


def test_plan_names_the_products(pairs: str) -> None:
    q, k, v, _ = rows(1, 2, 300, 16)
    assert (regard.plan(q, k, v).isa, regard.plan(q, k, v).products) == (pairs, PAIRS)
    assert regard.plan(q.float(), k.float(), v.float()).products == "float32"
    assert regard.plan(q[:, :, :1], k, v).products == "float32 (few query rows)"
    assert regard.plan(q, k, v, impl="reference").products == ""
    assert "multiplies" in str(regard.plan(q, k, v))


@pytest.mark.parametrize("isa", sorted(set(core.isas()) - {"wide", "avx512bf16"}), indirect=True)
def test_plan_says_why_not_pairs(isa: str) -> None:
    q, k, v, _ = rows(1, 2, 300, 16)
    text = regard.plan(q, k, v).products
    assert text.startswith(f"float32 (no {PAIRS}: ")
    assert ("not support" in text) == ("avx512bf16" not in core.isas())


def test_variable_selects_products_of_float32() -> None:
    code = "import torch; from regard._backends.native import core; print(core.products(torch.bfloat16))"
    for isa in core.isas():
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"REGARD_ISA": isa}
        )
        assert (done.stdout.strip() == PAIRS) == (isa in ("wide", "avx512bf16"))


def test_a_call_of_pairs_is_the_same_with_any_batch_and_threads(pairs: str) -> None:
    call = Call(*rows(3, 4, 130, 64, 3), {"mask": M.Causal()}, pairs)
    out, _ = call.run()
    torch.set_num_threads(1)
    assert torch.equal(call.run()[0], out)
    for b in range(3):
        one = call._replace(q=call.q[b : b + 1], k=call.k[b : b + 1], v=call.v[b : b + 1])
        assert torch.equal(one.run()[0], out[b : b + 1])
