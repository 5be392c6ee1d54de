"""`regard.compat.torch` against PyTorch's own functions, forward and backward."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from regard.compat import torch as C
from support import HAVE_CORE
from support.flash import packed_reference, signature
from support.tracing import Function, check_traced

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "matrices": ((5, 8), (7, 8), (7, 6)),
    "heads": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "batch": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
    "square": ((2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    "more-queries": ((1, 2, 9, 4), (1, 2, 4, 4), (1, 2, 4, 4)),
    "five-dims": ((2, 3, 2, 5, 4), (2, 3, 2, 7, 4), (2, 3, 2, 7, 4)),
    "batch-broadcast": ((2, 1, 4, 5, 8), (1, 3, 4, 6, 8), (4, 6, 8)),
    "key-heads-broadcast": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "query-heads-broadcast": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "value-heads-broadcast": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 8)),
    "rank-broadcast": ((5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
}
GROUPED = {
    "grouped": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    "grouped-three-dims": ((6, 5, 8), (3, 7, 8), (3, 7, 8)),
    "grouped-values-apart": ((1, 8, 5, 8), (1, 2, 7, 8), (1, 4, 7, 8)),
}
MASKS = ["none", "causal", "bool", "float", "infinite", "row", "scale"]


def keywords(name: str, q: Tensor, k: Tensor, leading: tuple[int, ...]) -> dict[str, Any]:
    Lq, Lk = q.shape[-2], k.shape[-2]
    keep = torch.rand(*leading, Lq, Lk) > 0.4
    keep[..., 0, :] = False  # one fully masked row
    infinite = torch.zeros(Lq, Lk, dtype=q.dtype).masked_fill(~keep[(0,) * len(leading)], -torch.inf)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": keep},
        "float": {"attn_mask": torch.randn(*leading, Lq, Lk, dtype=q.dtype, requires_grad=True)},
        "infinite": {"attn_mask": infinite},
        "row": {"attn_mask": torch.rand(1, Lk) > 0.4},
        "scale": {"scale": 0.7},
    }[name]  # fmt: skip


def compare(shapes: tuple[tuple[int, ...], ...], name: str, **options: Any) -> None:
    """Compares results and gradients with PyTorch's in float64."""
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    leading = torch.broadcast_shapes(*(x.shape[:-2] for x in leaves[: 1 if options else 3]))
    options |= keywords(name, leaves[0], leaves[1], leading)
    if "attn_mask" in options and options["attn_mask"].requires_grad:
        leaves.append(options["attn_mask"])
    out = C.scaled_dot_product_attention(*leaves[:3], **options)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*leaves[:3], **options)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(expected)
    actual = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(actual, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
        assert not a.isnan().any()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sdpa(shape: str, name: str) -> None:
    compare(SHAPES[shape], name)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", GROUPED)
def test_sdpa_with_grouped_heads(shape: str, name: str) -> None:
    compare(GROUPED[shape], name, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sdpa_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 9, 8).to(dtype) for _ in range(3))
    for options in ({"is_causal": True}, {"attn_mask": torch.randn(9, 9)}):
        out = C.scaled_dot_product_attention(q, k, v, **options)
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        assert out.dtype is dtype
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_fully_masked_rows_are_zeros_as_in_pytorch() -> None:
    q = torch.randn(1, 2, 3, 4)
    mask = torch.tensor([[False, False, False], [True, False, False], [True, True, True]])
    out = C.scaled_dot_product_attention(q, q, q, mask)
    assert not out[:, :, 0].any()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, mask))


def test_dropout_drops_weights() -> None:
    q = k = torch.zeros(1, 1, 1, 4)
    v = torch.eye(2000)[None, None]
    k = k.expand(1, 1, 2000, 4)
    out = C.scaled_dot_product_attention(q, k, v, dropout_p=0.25).flatten() * 2000
    kept = out > 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 4 / 3))
    assert 0.7 < kept.float().mean() < 0.8
    assert not C.scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()


@pytest.mark.parametrize("function", [C.scaled_dot_product_attention, F.scaled_dot_product_attention])
def test_what_pytorch_refuses(function: Function) -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool)
    with sdpa_kernel(SDPBackend.MATH):
        with pytest.raises(RuntimeError, match="attn_mask"):
            function(q, q, q, mask, is_causal=True)
        with pytest.raises(RuntimeError):
            function(q, k, k)
        with pytest.raises((RuntimeError, ValueError)):
            function(q, torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8), enable_gqa=True)
        for other in (mask.int(), mask.double()):
            with pytest.raises((RuntimeError, TypeError)):
                function(q, q, q, other)


def test_messages_say_what_to_write() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    with pytest.raises(
        RuntimeError, match="expected as many heads as query, 4, got 2 and 2; enable_gqa=True"
    ):
        C.scaled_dot_product_attention(q, k, k)
    with pytest.raises(RuntimeError, match="attn_mask, is_causal: expected one of them, got both; write "):
        C.scaled_dot_product_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)


def test_nested_tensors() -> None:
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (5, 3)], layout=torch.jagged)
    q = x.unflatten(-1, (2, 8)).transpose(1, 2)
    out = C.scaled_dot_product_attention(q, q, q, is_causal=True)
    for a, b in zip(out.unbind(), q.unbind(), strict=True):
        torch.testing.assert_close(a, F.scaled_dot_product_attention(b, b, b, is_causal=True))


def test_signatures() -> None:
    expected = "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False"
    assert signature(C.scaled_dot_product_attention) == expected
    if "num_splits" in inspect.signature(varlen.varlen_attn).parameters:  # from PyTorch 2.13 on
        assert signature(C.varlen_attn) == signature(varlen.varlen_attn)
    assert C.AuxRequest._field_defaults == varlen.AuxRequest._field_defaults == {"lse": False}


# Packed sequences


def cu(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 1), (-1, 2), (4, -1)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [((5, 0, 3), (5, 0, 3)), ((2, 4, 1), (7, 2, 6)), ((1, 1), (4, 9))])
def test_varlen_attn(lengths: tuple[tuple[int, ...], ...], window: tuple[int, int]) -> None:
    shapes = ((sum(lengths[0]), 4, 8), (sum(lengths[1]), 2, 8), (sum(lengths[1]), 2, 8))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sizes = (cu(lengths[0]), cu(lengths[1]), max(lengths[0]), max(lengths[1]))
    options: dict[str, Any] = {"window_size": window, "scale": 0.4, "enable_gqa": True}
    out, lse = C.varlen_attn(*leaves, *sizes, return_aux=C.AuxRequest(lse=True), **options)
    expected = packed_reference(*leaves, *lengths, window_size=window, softmax_scale=0.4)
    torch.testing.assert_close((out, lse), expected)
    dout = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, dout)
    torch.testing.assert_close(actual, torch.autograd.grad(expected[0], leaves, dout))
    assert torch.equal(C.varlen_attn(*leaves, *sizes, **options), out)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths_q", [(1, 1, 1), (3, 1, 2)])
@pytest.mark.parametrize("paged", [False, True])
def test_varlen_attn_with_seqused(paged: bool, lengths_q: tuple[int, ...], window: tuple[int, int]) -> None:
    used, slots = (5, 20, 9), 32
    q, rows = torch.randn(sum(lengths_q), 4, 8), torch.randn(3, slots, 2, 16)
    if paged:
        table = torch.randperm(6).reshape(3, 2)
        pages = torch.empty(6, 16, 2, 16)
        pages[table] = rows.unflatten(1, (2, 16))
        k, v = pages.split(8, -1)
        options: dict[str, Any] = {"block_table": table.int()}
    else:
        (k, v), options = rows.flatten(0, 1).split(8, -1), {}
    sizes = (cu(lengths_q), None if paged else cu((slots,) * 3), max(lengths_q), slots)
    out = C.varlen_attn(
        q, k, v, *sizes, window_size=window, enable_gqa=True, seqused_k=torch.tensor(used), **options
    )
    keys = torch.cat([x[:n] for x, n in zip(rows, used, strict=True)]).split(8, -1)
    expected = packed_reference(q, *keys, lengths_q, used, window_size=window)[0]
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=1e-5)


def test_varlen_attn_refuses_what_pytorch_refuses() -> None:
    q, k = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="key: expected Hq = 4 heads as in query, or a divisor with"):
        C.varlen_attn(q, k, k, cu((4,)), cu((4,)), 4, 4)
    with pytest.raises(ValueError, match="seqused_k: expected the number of keys"):
        C.varlen_attn(q, q[None], q[None], cu((4,)), None, 4, 4, block_table=torch.zeros(1, 1).int())


# torch.compile, torch.export, vmap, fake tensors

TRACED: dict[str, Function] = {
    "causal": lambda q, k, v: C.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "bool": lambda q, k, v: C.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1], torch.ones(9, 9).tril() > 0
    ),
    "float": lambda q, k, v: C.scaled_dot_product_attention(
        q[:, :2], k, v, torch.arange(9.0).neg(), scale=0.3
    ),
    "varlen": lambda q, k, v: C.varlen_attn(
        *(x[0].transpose(0, 1) for x in (q, k, v)), *(torch.tensor([0, 4, 9]),) * 2, 5, 5, enable_gqa=True
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced(name: str) -> None:
    check_traced(TRACED[name], [torch.randn(2, H, 9, 8) for H in (4, 2, 2)])
