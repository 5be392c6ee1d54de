"""The reference against PyTorch's math kernel in float64; fully masked rows, NaN, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import masks as M, scores
from regard._backends import reference
from regard._call.dropout import keep_mask
from regard._call.make import make
from regard._call.spec import Options
from support import assert_close

B, H, LQ, LK, D, DV = 2, 3, 5, 7, 11, 13
NAN, INF = float("nan"), float("inf")


def qkv(dtype: torch.dtype = torch.float64, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (B, 2 * H, LQ, D), (B, H, LK, D), (B, H, LK, DV)
    q, k, v = (torch.randn(size, dtype=dtype, requires_grad=grad) for size in sizes)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = regard.attention(q, k, v, impl="reference", return_lse=True, **options)
    return out, lse


def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Runs scaled_dot_product_attention with PyTorch's math kernel."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True, **options)


# Against PyTorch


def test_no_options() -> None:
    q, k, v = qkv()
    out, lse = attend(q, k, v)
    assert_close(out, sdpa(q, k, v), rtol=1e-12, atol=1e-13)
    s = q @ k.repeat_interleave(2, 1).mT / D**0.5
    assert_close(lse, s.logsumexp(-1), rtol=1e-12)


def test_causal_at_offset_zero_is_is_causal() -> None:
    q, k, v = qkv()
    assert_close(attend(q, k, v, mask=M.Causal(), offset=0)[0], sdpa(q, k, v, is_causal=True), rtol=1e-12)


@pytest.mark.parametrize("shape", [(LQ, LK), (1, 2 * H, 1, LK), (B, 1, LQ, LK), (B, 2 * H, LQ, 1)])
def test_bool_masks(shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    keep = torch.rand(shape) > 0.4
    assert_close(attend(q, k, v, mask=keep)[0], sdpa(q, k, v, keep), rtol=1e-12)


@pytest.mark.parametrize("shape", [(LQ, LK), (1, 2 * H, 1, LK), (B, 1, LQ, LK)])
def test_bias_and_scale(shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    bias = torch.randn(shape, dtype=torch.float64)
    bias[..., 2] = -INF
    assert_close(attend(q, k, v, bias=bias, scale=-0.3)[0], sdpa(q, k, v, bias, scale=-0.3), rtol=1e-12)


def test_default_offset_is_aligned_to_the_bottom_right() -> None:
    q, k, v = qkv()
    last = attend(q[:, :, -1:], k, v, mask=M.Causal())[0]
    assert_close(attend(q, k, v, mask=M.Causal())[0][:, :, -1:], last, rtol=1e-12)
    assert_close(last, sdpa(q[:, :, -1:], k, v), rtol=1e-12)


def test_an_offset_for_each_sample() -> None:
    q, k, v = qkv()
    offsets = torch.tensor([1, -2])
    options: dict[str, Any] = {"mask": M.Causal() & M.Window(3, 0), "bias": scores.Alibi.standard(2 * H)}
    out, lse = attend(q, k, v, offset=offsets, **options)
    for b, offset in enumerate(offsets.tolist()):
        alone, alone_lse = attend(q[b], k[b], v[b], offset=offset, **options)
        assert_close(out[b], alone, rtol=1e-12)
        assert_close(lse[b], alone_lse, rtol=1e-12)


def test_order_of_softcap_bias_mask_and_sink() -> None:
    q, k, v = qkv()
    bias, sink = torch.randn(LQ, LK, dtype=torch.float64), torch.randn(2 * H, dtype=torch.float64)
    out, lse = attend(q, k, v, mask=M.Causal(), bias=bias, scale=2.0, softcap=1.5, sink=sink)
    s = 1.5 * torch.tanh(2.0 * q @ k.repeat_interleave(2, 1).mT / 1.5) + bias
    s = s.masked_fill(~torch.ones(LQ, LK, dtype=torch.bool).tril(LK - LQ), -INF)
    s = torch.cat([s, sink.view(1, -1, 1, 1).expand(B, -1, LQ, 1)], -1)
    assert_close(out, s.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1), rtol=1e-12)
    assert_close(lse, s.logsumexp(-1), rtol=1e-12)


@pytest.mark.parametrize("bias", ["alibi", "relative"])
def test_structured_bias_matches_its_dense_form(bias: str) -> None:
    q, k, v = qkv()
    table = torch.randn(8, 2 * H, dtype=torch.float64)
    structured = (
        scores.Alibi(torch.rand(2 * H, dtype=torch.float64))
        if bias == "alibi"
        else scores.RelativeBias(table)
    )
    dense = structured.dense(LQ, LK, 4)[None]
    assert_close(attend(q, k, v, bias=structured, offset=4)[0], attend(q, k, v, bias=dense)[0], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_result_is_rounded(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    out, lse = attend(q, k, v)
    exact, exact_lse = attend(q.double(), k.double(), v.double())
    assert out.dtype is dtype
    assert torch.equal(out, exact.to(dtype))
    assert lse.dtype is torch.float32
    assert torch.equal(lse, exact_lse.float())


def test_multiplying_by_weights_is_attention() -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {"mask": M.Causal(), "sink": torch.randn(2 * H), "dropout": 0.3, "seed": 4}
    w = regard.weights(q, k, v, **options)
    assert w.shape == (B, 2 * H, LQ, LK)
    assert_close(w @ v.repeat_interleave(2, 1), attend(q, k, v, **options)[0], rtol=1e-12)


# Sizes of zero


@pytest.mark.parametrize("zero", ["B", "H", "Lq", "Lk", "D", "Dv"])
def test_zero_sizes_as_in_torch(zero: str) -> None:
    b, h, lq, lk, d, dv = (0 if name == zero else n for name, n in zip(
        ("B", "H", "Lq", "Lk", "D", "Dv"), (B, H, LQ, LK, D, DV), strict=True))  # fmt: skip
    q, k, v = torch.randn(b, h, lq, d), torch.randn(b, h, lk, d), torch.randn(b, h, lk, dv)
    expected = F.scaled_dot_product_attention(q, k, v)
    out, lse = attend(q, k, v)
    assert lse.shape == (b, h, lq)
    assert_close(out, expected)
    if zero == "Lk":
        assert torch.equal(lse, torch.full((b, h, lq), -INF))
        sink = torch.randn(h)
        assert_close(attend(q, k, v, sink=sink)[1], sink.view(1, -1, 1).expand(b, h, lq))
    assert attend(q, k, v, mask=M.Causal())[0].shape == expected.shape


# Fully masked rows


@pytest.mark.parametrize(
    "rows", [[0, 1], [2], [3, 4], [0, 1, 2, 3, 4]], ids=["leading", "middle", "tail", "all"]
)
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_fully_masked_rows_and_their_gradients_are_zero(rows: list[int], how: str) -> None:
    q, k, v = qkv(grad=True)
    keep = torch.ones(LQ, LK, dtype=torch.bool)
    keep[rows] = False
    bias = torch.zeros(LQ, LK, dtype=torch.float64).masked_fill(~keep, -INF).requires_grad_()
    out, lse = attend(q, k, v, mask=keep) if how == "mask" else attend(q, k, v, bias=bias)
    full, full_lse = attend(q, k, v)
    others = [i for i in range(LQ) if i not in rows]
    assert (out[:, :, rows] == 0).all()
    assert (lse[:, :, rows] == -INF).all()
    assert_close(out[:, :, others], full[:, :, others], rtol=1e-12)
    assert_close(lse[:, :, others], full_lse[:, :, others], rtol=1e-12)
    (out.square().sum() + lse[:, :, others].sum()).backward()
    assert q.grad is not None
    assert (q.grad[:, :, rows] == 0).all()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
    if how == "bias":
        assert bias.grad is not None
        assert (bias.grad[rows] == 0).all()


def test_fully_masked_rows_with_a_sink() -> None:
    q, k, v = qkv()
    sink = torch.randn(2 * H)
    out, lse = attend(q, k, v, mask=M.Lengths(torch.tensor([0, LK])), sink=sink)
    assert (out[0] == 0).all()
    assert_close(lse[0], sink[:, None].expand(-1, LQ).double())


def test_bias_of_finfo_min_gives_the_mean_of_v() -> None:
    for dtype in (torch.float64, torch.float32):
        q, k, v = qkv(dtype)
        bias = torch.full((LQ, LK), torch.finfo(dtype).min, dtype=dtype)
        expected = v.repeat_interleave(2, 1).mean(2, keepdim=True).expand(-1, -1, LQ, -1)
        assert_close(attend(q, k, v, bias=bias)[0], expected)


# NaN and Inf


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["k", "v", "both"])
def test_masked_nan_changes_nothing(poison: float, where: str) -> None:
    q, k, v = qkv()
    keep = torch.ones(LQ, LK, dtype=torch.bool)
    keep[:, 3] = False
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    dirty = [x.clone() for x in (q, k, v)]
    for name, x in zip("kv", dirty[1:], strict=True):
        if where in (name, "both"):
            x[:, :, 3] = poison
    for x in dirty:
        x.requires_grad_()
    results = []
    for inputs in (clean, dirty):
        out, lse = attend(*inputs, mask=keep)
        (out.square().sum() + lse.square().sum()).backward()
        results.append([out, lse, *(x.grad for x in inputs)])
    for a, b in zip(*results, strict=True):
        assert_close(b, a, rtol=1e-12)


@pytest.mark.parametrize("where", ["k", "v"])
def test_attended_nan_reaches_only_attending_rows(where: str) -> None:
    q, k, v = qkv()
    expected = attend(q, k, v, mask=M.Causal(), offset=0)[0]
    (k if where == "k" else v)[:, :, 3] = NAN
    out = attend(q, k, v, mask=M.Causal(), offset=0)[0]
    assert_close(out[:, :, :3], expected[:, :, :3], rtol=1e-12)
    assert out[:, :, 3:].isnan().all()


def test_nan_query_in_a_fully_masked_row_has_zero_gradient() -> None:
    q, k, v = qkv()
    q[:, :, 1] = NAN
    keep = torch.ones(LQ, LK, dtype=torch.bool)
    keep[1] = False
    for x in (q, k, v):
        x.requires_grad_()
    out, _ = attend(q, k, v, mask=keep)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


# Gradients

GRAD_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": M.Causal(), "offset": 0},
    "empty rows": {"mask": M.Causal(), "offset": -1},
    "softcap": {"softcap": 1.3},
    "dropout": {"dropout": 0.4, "seed": 9},
    "lengths": {"mask": M.Lengths(torch.tensor([2, 0]))},
}


@pytest.mark.parametrize("name", GRAD_OPTIONS)
def test_gradcheck(name: str) -> None:
    options = GRAD_OPTIONS[name]
    sizes = (2, 2, 3, 2), (2, 1, 4, 2), (2, 1, 4, 3), (3, 4), (2,)
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]

    def outputs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, bias=bias, sink=sink, **options)

    assert torch.autograd.gradcheck(outputs, inputs)


def test_gradients_of_structured_biases() -> None:
    q, k, v = (torch.randn(2, 3, 2, dtype=torch.float64) for _ in range(3))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    table = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: attend(q, k, v, bias=scores.Alibi(x)), slopes)
    assert torch.autograd.gradcheck(lambda x: attend(q, k, v, bias=scores.RelativeBias(x)), table)


# Dropout


def kept_in_python(seed: int, p: float, Hq: int, b: int, h: int, i: int, j: int) -> bool:
    """Computes the documented dropout pattern with Python integers."""
    m64, m32, golden = 2**64 - 1, 2**32 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & m64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & m64
        return z ^ (z >> 31)

    w = mix((mix((mix((seed + golden) & m64) + b * Hq + h) & m64) + i) & m64)
    a, c = w & m32, w >> 32
    x = ((j >> 1) * 0x9E3779B9 + a) & m32
    x ^= x >> 16
    x = x * 0x7FEB352D & m32
    x ^= x >> 15
    x ^= c
    x = x * 0x846CA68B & m32
    x ^= x >> 16
    u = x & 0xFFFF if j % 2 == 0 else x >> 16
    return u >= round(p * 65536)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_the_dropout_pattern(seed: int) -> None:
    pattern = keep_mask(seed, 0.3, 2, 3, 4, 5, torch.device("cpu"))
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (2, 3, 4, 5))).tolist():
        assert pattern[b, h, i, j] == kept_in_python(seed, 0.3, 3, b, h, i, j)


def test_dropout_keeps_the_right_share_without_structure() -> None:
    pattern = keep_mask(7, 0.25, 4, 4, 64, 64, torch.device("cpu")).double()
    assert abs(pattern.mean().item() - 0.75) < 0.005
    x = pattern - pattern.mean()
    for dim in range(4):
        assert abs((x * x.roll(1, dim)).mean().item()) < 0.005


def test_dropout_of_a_key_ignores_the_number_of_keys() -> None:
    cpu = torch.device("cpu")
    assert torch.equal(keep_mask(5, 0.5, 2, 3, 4, 9, cpu)[..., :5], keep_mask(5, 0.5, 2, 3, 4, 5, cpu))


def test_dropout_of_zero_and_one() -> None:
    q, k, v = qkv()
    assert torch.equal(attend(q, k, v, dropout=0.0, seed=1)[0], attend(q, k, v)[0])
    out, lse = attend(q, k, v, dropout=1.0)
    assert (out == 0).all()
    assert torch.equal(lse, attend(q, k, v)[1])


def test_kept_weights_are_rescaled() -> None:
    q, k, v = qkv()
    w, full = regard.weights(q, k, v, dropout=0.5, seed=3), regard.weights(q, k, v)
    assert ((w == 0) | torch.isclose(w, 2 * full)).all()
    assert (w == 0).any()


def test_reference_supports_every_call() -> None:
    assert reference.reasons(make(*qkv(), Options(dropout=0.5, softcap=1.0, sink=torch.zeros(2 * H)))) == ()
