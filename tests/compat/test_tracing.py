"""Every function of `regard.compat`, and `convert.sdpa`, under compile, export, vmap and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

import regard
from regard import masks, scores
from regard.compat import flash_attn, flash_attn_interface, flex_attention, torch as compat_torch, xformers
from support import HAVE_CORE
from support.tracing import Function, Wrapped, check_traced

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

B, L, HQ, HKV, D = 2, 9, 4, 2, 8
CU = [0, 4, 9, 18]  # cumulative lengths of three sequences in B * L tokens
X, FLEX, F2, F3 = xformers, flex_attention, flash_attn, flash_attn_interface


def cu() -> Tensor:
    return torch.tensor(CU, dtype=torch.int32)


def rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def equal_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, :, :HKV], k, v


def packed_row(call: Function) -> Function:
    """Returns a function that calls `call` with q, k, v (1, 18, 2, D)."""
    return lambda q, k, v: call(*(rows(x)[None] for x in equal_heads(q, k, v)))


def biased(bias: Callable[[], object]) -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return X.memory_efficient_attention(q, k, v, bias())  # type: ignore[arg-type]

    return packed_row(call)


def cached(function: Function, **options: object) -> Function:
    """Returns a function that writes k and v into fresh caches. Their contents are part of the result."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        caches = [torch.zeros(B, 32, HKV, D) + 0 * q.sum() for _ in range(2)]
        lengths = torch.tensor([3, 17])
        out = function(q[:, :3], *caches, k[:, :3], v[:, :3], cache_seqlens=lengths, causal=True, **options)
        return out, *caches

    return call


def with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with regard.convert.sdpa():
        return torch.nn.functional.scaled_dot_product_attention(
            *(heads(x) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )


LENGTHS = [7, 11]
CASES: dict[str, Function] = {
    "torch.scaled_dot_product_attention": lambda q, k, v: regard.scaled_dot_product_attention(
        *(heads(x) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ),
    "torch.varlen_attn": lambda q, k, v: compat_torch.varlen_attn(
        *(rows(x) for x in (q, k, v)), *(cu(),) * 2, 9, 9, window_size=(3, 0), enable_gqa=True
    ),
    "convert.sdpa": with_sdpa,
    "flash_attn.flash_attn_func": lambda q, k, v: F2.flash_attn_func(q, k, v, causal=True, softcap=3.0),
    "flash_attn.flash_attn_kvpacked_func": lambda q, k, v: F2.flash_attn_kvpacked_func(
        q, torch.stack([k, v], 2), window_size=(5, 2)
    ),
    "flash_attn.flash_attn_qkvpacked_func": lambda q, k, v: F2.flash_attn_qkvpacked_func(
        torch.stack(equal_heads(q, k, v), 2), causal=True
    ),
    "flash_attn.flash_attn_varlen_func": lambda q, k, v: F2.flash_attn_varlen_func(
        rows(q), rows(k), rows(v), *(cu(),) * 2, 9, 9, causal=True
    ),
    "flash_attn.flash_attn_varlen_kvpacked_func": lambda q, k, v: F2.flash_attn_varlen_kvpacked_func(
        rows(q), torch.stack([rows(k), rows(v)], 1), *(cu(),) * 2, 9, 9, causal=True
    ),
    "flash_attn.flash_attn_varlen_qkvpacked_func": lambda q, k, v: F2.flash_attn_varlen_qkvpacked_func(
        torch.stack([rows(x) for x in equal_heads(q, k, v)], 1), cu(), 9, causal=True
    ),
    "flash_attn.flash_attn_with_kvcache": cached(F2.flash_attn_with_kvcache),
    "flash_attn.index_first_axis": lambda q, k, v: F2.index_first_axis(rows(q), torch.tensor([2, 0, 7])),
    "flash_attn.index_put_first_axis": lambda q, k, v: F2.index_put_first_axis(
        rows(q)[:3], torch.tensor([2, 0, 7]), 11
    ),
    "flash_attn.pad_input": lambda q, k, v: F2.pad_input(rows(q)[:3], torch.tensor([2, 0, 7]), 2, 5),
    "flash_attn.apply_rotary_emb": lambda q, k, v: F2.apply_rotary_emb(
        q, torch.ones(20, 3), torch.zeros(20, 3), seqlen_offsets=torch.tensor([4, 1])
    ),
    "flash_attn_interface.flash_attn_func": lambda q, k, v: F3.flash_attn_func(
        q, k, v, causal=True, attention_chunk=4
    ),
    "flash_attn_interface.flash_attn_qkvpacked_func": lambda q, k, v: F3.flash_attn_qkvpacked_func(
        torch.cat([q, k, v], 2), num_heads_q=HQ, causal=True
    ),
    "flash_attn_interface.flash_attn_varlen_func": lambda q, k, v: F3.flash_attn_varlen_func(
        rows(q), rows(k), rows(v), *(cu(),) * 2, 9, 9, window_size=(3, 0)
    ),
    "flash_attn_interface.flash_attn_combine": lambda q, k, v: F3.flash_attn_combine(
        torch.stack([k, v]), torch.stack([k[..., 0], v[..., 0]])
    ),
    "flash_attn_interface.flash_attn_with_kvcache": cached(F3.flash_attn_with_kvcache),
    "flex_attention.flex_attention": lambda q, k, v: FLEX.flex_attention(
        *(heads(x) for x in (q, k, v)), block_mask=masks.Causal(), enable_gqa=True, return_lse=True
    ),
    "flex_attention.softcap": lambda q, k, v: FLEX.flex_attention(
        *(heads(x) for x in equal_heads(q, k, v)), FLEX.softcap(3.0)
    ),
    "flex_attention alibi": lambda q, k, v: FLEX.flex_attention(
        *(heads(x) for x in equal_heads(q, k, v)), scores.Alibi(torch.tensor([0.1, 0.2]))
    ),
    "xformers.memory_efficient_attention": lambda q, k, v: X.memory_efficient_attention(
        *equal_heads(q, k, v), scale=0.3
    ),
    "xformers groups": lambda q, k, v: X.memory_efficient_attention(
        q.unflatten(2, (HKV, -1)), k[:, :, :, None], v[:, :, :, None], X.LowerTriangularMask()
    ),
    "xformers tensor": lambda q, k, v: X.memory_efficient_attention(
        *equal_heads(q, k, v), torch.arange(9.0).neg().expand(B, HKV, 9, 9)
    ),
    "xformers.LowerTriangularMask": biased(X.LowerTriangularMask),
    "xformers.LowerTriangularMaskWithTensorBias": biased(
        lambda: X.LowerTriangularMaskWithTensorBias(torch.ones(1, 1, 1, 18))
    ),
    "xformers.LowerTriangularFromBottomRightMask": biased(X.LowerTriangularFromBottomRightMask),
    "xformers.LowerTriangularFromBottomRightLocalAttentionMask": biased(
        lambda: X.LowerTriangularFromBottomRightLocalAttentionMask(5)
    ),
    "xformers.LocalAttentionFromBottomRightMask": biased(lambda: X.LocalAttentionFromBottomRightMask(3, 2)),
    "xformers.BlockDiagonalMask": biased(lambda: X.BlockDiagonalMask.from_seqlens(LENGTHS)),
    "xformers.BlockDiagonalCausalMask": biased(lambda: X.BlockDiagonalCausalMask.from_seqlens(LENGTHS)),
    "xformers.BlockDiagonalCausalFromBottomRightMask": biased(
        lambda: X.BlockDiagonalMask.from_seqlens(LENGTHS).make_causal_from_bottomright()
    ),
    "xformers.BlockDiagonalCausalLocalAttentionMask": biased(
        lambda: X.BlockDiagonalMask.from_seqlens(LENGTHS).make_local_attention(3)
    ),
    "xformers.BlockDiagonalCausalLocalAttentionFromBottomRightMask": biased(
        lambda: X.BlockDiagonalMask.from_seqlens(LENGTHS).make_local_attention_from_bottomright(3)
    ),
    "xformers.BlockDiagonalPaddedKeysMask": biased(
        lambda: X.BlockDiagonalPaddedKeysMask.from_seqlens(LENGTHS, 9, [4, 8])
    ),
    "xformers.BlockDiagonalCausalWithOffsetPaddedKeysMask": biased(
        lambda: X.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([9, 9], 9, [4, 8])
    ),
    "xformers.BlockDiagonalLocalAttentionPaddedKeysMask": biased(
        lambda: X.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(LENGTHS, 9, [4, 8], 2, 1)
    ),
    "xformers.BlockDiagonalCausalLocalAttentionPaddedKeysMask": biased(
        lambda: X.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(LENGTHS, 9, [4, 8], 3)
    ),
}
# Names without a case of their own, with the reason.
OTHERS = {
    "flash_attn.unpad_input": "test_unpad_input",
    "flash_attn_interface.get_scheduler_metadata": "returns None",
    "torch.AuxRequest": "a tuple",
    "flex_attention.Softcap": "the class that softcap returns",
    **dict.fromkeys(
        (
            f"flex_attention.{name}"
            for name in FLEX.__all__
            if hasattr(torch.nn.attention.flex_attention, name)
        ),
        "PyTorch's own",
    ),
    "xformers.AttentionBias": "a base class",
}
MODULES: dict[str, ModuleType] = {
    "torch": compat_torch,
    "flash_attn": F2,
    "flash_attn_interface": F3,
    "flex_attention": FLEX,
    "xformers": X,
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, L, H, D, generator=generator) for H in (HQ, HKV, HKV)]


@pytest.mark.parametrize("name", CASES)
def test_traced(name: str) -> None:
    torch._dynamo.reset()
    check_traced(CASES[name], inputs())


@pytest.mark.parametrize("name", [name for name in CASES if "with_kvcache" not in name])
def test_gradients_of_compiled_functions(name: str) -> None:
    torch._dynamo.reset()
    function = CASES[name]

    def gradients(call: Function) -> list[Tensor | None]:
        leaves = [x.requires_grad_() for x in inputs()]
        result = call(*leaves)
        out = result[0] if isinstance(result, tuple) else result
        return list(torch.autograd.grad(out.square().sum(), leaves, allow_unused=True))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(gradients(compiled), gradients(function), strict=True):
        assert (ours is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_every_function_has_a_case() -> None:
    names = {f"{prefix}.{name}" for prefix, module in MODULES.items() for name in module.__all__}
    assert names <= CASES.keys() | OTHERS.keys()
    assert OTHERS.keys() <= names


def test_unpad_input() -> None:
    """The shape of the result depends on values, so `unpad_input` cannot be mapped by vmap."""
    torch._dynamo.reset()
    x, lengths = inputs()[0], torch.tensor([4, 7])

    def unpad(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, indices, cu_seqlens, longest, used = F2.unpad_input(x, torch.arange(L) < lengths[:, None])
        return rows, indices, cu_seqlens, used + longest

    compiled = torch.compile(unpad, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Wrapped(unpad), (x, lengths)).module()
    for call in (compiled, exported):
        for ours, expected in zip(call(x, lengths), unpad(x, lengths), strict=True):
            assert torch.equal(ours, expected)


TWO = torch.tensor([0, 9, 18], dtype=torch.int32)
READS_VALUES: dict[str, Function] = {
    "seqused_k": lambda q, cu: F3.flash_attn_varlen_func(*(q,) * 3, cu, cu, 9, 9, seqused_k=cu[1:] - 3),
    "chunk": lambda q, cu: F3.flash_attn_varlen_func(*(q,) * 3, cu, cu, 9, 9, attention_chunk=4),
    "slopes": lambda q, cu: F2.flash_attn_varlen_func(*(q,) * 3, cu, cu, 9, 9, alibi_slopes=torch.ones(2, 4)),
    "other cu_seqlens": lambda q, cu: F2.flash_attn_varlen_func(*(q,) * 3, cu, TWO, 14, 9, causal=True),
}


@pytest.mark.parametrize("name", READS_VALUES)
def test_functions_that_read_cu_seqlens_say_so(name: str) -> None:
    torch._dynamo.reset()
    function, q = READS_VALUES[name], rows(inputs()[0])
    assert function(q, TWO).shape == q.shape
    with pytest.raises(Exception, match=r"cu_seqlens cannot be read"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(q, TWO.clone())
    with pytest.raises(NotImplementedError, match=r"cu_seqlens cannot be read"):
        torch.export.export(Wrapped(function), (q, TWO.clone()))
