"""`compat.flex_attention` against PyTorch's flex_attention, and its gradients against float64.

PyTorch's flex_attention has no gradients on a CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import export
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask

import regard
from regard import masks, scores
from regard.compat import flex_attention as ours
from support import assert_close
from support.compat import check_against, textbook

B, H, D, DV = 2, 4, 8, 5
Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    # raised while PyTorch compiles a mask_mod that indexes a tensor
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec. is deprecated:FutureWarning"),
]

IDS = torch.tensor([[0] * 19 + [1] * 30 + [2] * 24, [0] * 40 + [5] * 33])
LENGTHS = torch.tensor([50, 73])
SLOPES = torch.tensor([3, 10, 17, 60])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() <= 11


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return IDS[b, q] == IDS[b, k]


def per_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() < SLOPES[h]


MODS: dict[str, Mod] = {
    "causal": causal,
    "window": window,
    "prefix": lambda b, h, q, k: (q >= k) | (k < 13),
    "documents": documents,
    "per head": per_head,
    "lengths": lambda b, h, q, k: k < LENGTHS[b],
    "checkerboard": lambda b, h, q, k: (q + k) % 2 == 0,
    "dilated, causal": ours.and_masks(causal, lambda b, h, q, k: (q - k) % 3 == 0),
    "documents or sink": ours.or_masks(ours.and_masks(causal, documents), lambda b, h, q, k: k == 0),
    "nothing in some rows": lambda b, h, q, k: (q % 7 != 0) & (k <= q + h),
    "reduction": lambda b, h, q, k: (torch.stack([q, k]).sum() % 5) < 3,
}
BLOCKS = [16, (16, 32), 128]


def tensors(Lq: int = 73, Lk: int = 73, Hkv: int = H) -> list[Tensor]:
    return [torch.randn(B, heads, L, C) for heads, L, C in ((H, Lq, D), (Hkv, Lk, D), (Hkv, Lk, DV))]


def block_mask_of(mod: Mod, Lq: int = 73, Lk: int = 73, block: Any = 16) -> BlockMask:
    return create_block_mask(mod, B, H, Lq, Lk, device="cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", MODS)
def test_forward_equals_torch(name: str, block: Any) -> None:
    q, k, v = tensors()
    block_mask = block_mask_of(MODS[name], block=block)
    out, lse = ours.flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    want, want_lse = theirs.flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    assert_close(out, want)
    assert_close(lse, want_lse)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", MODS)
def test_gradients(name: str, block: Any) -> None:
    block_mask, keep = block_mask_of(MODS[name], block=block), create_mask(MODS[name], B, H, 73, 73, "cpu")
    check_against(
        lambda q, k, v: ours.flex_attention(q, k, v, block_mask=block_mask),
        lambda q, k, v: textbook(q, k, v, keep=keep),
        tensors(),
        1e-5,
    )


@pytest.mark.parametrize("sizes", [(1, 73), (31, 73), (73, 31), (17, 160)], ids=str)
@pytest.mark.parametrize("Hkv", [4, 2, 1])
def test_sizes_and_grouped_heads(Hkv: int, sizes: tuple[int, int]) -> None:
    mod: Mod = lambda b, h, q, k: (k <= q + 40) & ((q + h) % 5 > 0)  # noqa: E731
    block_mask, keep = block_mask_of(mod, *sizes), create_mask(mod, B, H, *sizes, "cpu")
    inputs = tensors(*sizes, Hkv)
    assert_close(
        ours.flex_attention(*inputs, block_mask=block_mask, scale=0.3, enable_gqa=True),
        theirs.flex_attention(*inputs, block_mask=block_mask, scale=0.3, enable_gqa=True),
    )
    check_against(
        lambda q, k, v: ours.flex_attention(q, k, v, block_mask=block_mask, scale=0.3, enable_gqa=True),
        lambda q, k, v: textbook(q, k, v, keep=keep, scale=0.3),
        inputs,
        1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    block_mask, keep = block_mask_of(documents), create_mask(documents, B, H, 73, 73, "cpu")
    check_against(
        lambda q, k, v: ours.flex_attention(q, k, v, block_mask=block_mask),
        lambda q, k, v: textbook(q, k, v, keep=keep),
        [x.to(dtype) for x in tensors()],
        1e-12 if dtype is torch.float64 else 1e-2,
    )


def test_shared_masks_and_shared_keys() -> None:
    """A BlockMask made with B = H = None applies to all samples; one sample of keys may serve all queries."""
    q, k, v = tensors()
    for heads in (None, H):
        block_mask = create_block_mask(causal, None, heads, 73, 73, device="cpu", BLOCK_SIZE=16)
        assert_close(
            ours.flex_attention(q, k, v, block_mask=block_mask),
            theirs.flex_attention(q, k, v, block_mask=block_mask),
        )
    block_mask = block_mask_of(documents)
    assert_close(
        ours.flex_attention(q, k[:1], v[:1], block_mask=block_mask),
        theirs.flex_attention(q, k[:1].expand_as(k), v[:1].expand_as(v), block_mask=block_mask),
    )
    assert_close(ours.flex_attention(q, k, v), theirs.flex_attention(q, k, v))


# What a BlockMask becomes


def test_memory_grows_with_different_partial_blocks_only() -> None:
    L, block = 8192, 128
    block_mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 1000), 1, 1, L, L, device="cpu", BLOCK_SIZE=block
    )
    mask = masks.from_flex(block_mask)
    assert isinstance(mask, masks.BlockPatterns)
    # nothing, everything, the diagonal, and the two patterns of the window's far end
    assert mask.patterns.shape == (5, block, block)
    assert mask.table.shape == (L // block, L // block)
    assert mask.patterns.numel() + mask.table.nbytes < L * L / 500


def test_mask_mod_is_evaluated_once_and_in_partial_blocks_only() -> None:
    seen = []

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen.append(1)
        return q >= k

    block_mask = create_block_mask(mod, 1, 1, 256, 256, device="cpu", BLOCK_SIZE=16)
    seen.clear()
    for _ in range(3):
        ours.flex_attention(*tensors(256, 256), block_mask=block_mask)
    assert len(seen) == 1
    full = create_block_mask(lambda b, h, q, k: q // 16 >= k // 16, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    full.mask_mod = lambda b, h, q, k: pytest.fail("there is no partial block")
    assert masks.from_flex(full) == masks.Blocks(torch.ones(4, 4).tril().bool(), 16)


def test_a_changed_block_mask_is_converted_again() -> None:
    q, k, v = tensors()
    block_mask = block_mask_of(causal)
    first = ours.flex_attention(q, k, v, block_mask=block_mask)
    block_mask.mask_mod = lambda b, h, q, k: q > k
    changed = ours.flex_attention(q, k, v, block_mask=block_mask)
    assert not torch.allclose(first, changed)
    block_mask.kv_num_blocks.zero_()
    assert not torch.allclose(changed, ours.flex_attention(q, k, v, block_mask=block_mask))


def test_a_mask_made_without_gradients_serves_training() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    with torch.inference_mode():
        block_mask = block_mask_of(documents)
        ours.flex_attention(q, k, v, block_mask=block_mask)
    ours.flex_attention(q, k, v, block_mask=block_mask).sum().backward()
    assert q.grad is not None


def test_blocks_without_a_mask_mod_are_whole() -> None:
    """PyTorch's kernels and this function compute the listed blocks only, its CPU formula computes all."""
    counts, indices = (
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
    )
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(32, 32))
    q, k, v = tensors(32, 32)
    keep = torch.tensor([[False, True], [True, True]]).repeat_interleave(16, 0).repeat_interleave(16, 1)
    out = ours.flex_attention(q, k, v, block_mask=block_mask)
    assert_close(out, textbook(q.double(), k.double(), v.double(), keep=keep))


# Score mods


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - scores.Alibi.standard(H).slopes[h] * (q - k).abs()


@pytest.mark.parametrize("sizes", [(73, 73), (31, 73)], ids=str)
def test_alibi(sizes: tuple[int, int]) -> None:
    q, k, v = tensors(*sizes)
    block_mask = block_mask_of(causal, *sizes)
    bias = scores.Alibi.standard(H)
    assert_close(
        ours.flex_attention(q, k, v, bias, block_mask), theirs.flex_attention(q, k, v, alibi, block_mask)
    )
    dense, keep = bias.dense(*sizes, 0).double(), create_mask(causal, B, H, *sizes, "cpu")
    check_against(
        lambda q, k, v: ours.flex_attention(q, k, v, bias, block_mask),
        lambda q, k, v: textbook(q, k, v, keep=keep, bias=dense),
        [q, k, v],
        1e-5,
    )


def test_relative_bias_and_tensors() -> None:
    inputs = tensors(31, 73)

    def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return ours.flex_attention(q, k, v, scores.RelativeBias(table, max_distance=40))

    def expected(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return textbook(q, k, v, bias=scores.RelativeBias(table, max_distance=40).dense(31, 73, 0))

    check_against(relative, expected, [*inputs, torch.randn(16, H)], 1e-5)
    check_against(
        lambda q, k, v, bias: ours.flex_attention(q, k, v, bias),
        lambda q, k, v, bias: textbook(q, k, v, bias=bias),
        [*inputs, torch.randn(B, 1, 31, 73)],
        1e-5,
    )


def test_softcap() -> None:
    q, k, v = tensors()
    mod, block_mask = ours.softcap(1.5), block_mask_of(causal)
    assert_close(
        ours.flex_attention(q, k, v, mod, block_mask), theirs.flex_attention(q, k, v, mod, block_mask)
    )
    keep = create_mask(causal, B, H, 73, 73, "cpu")
    check_against(
        lambda q, k, v: ours.flex_attention(q, k, v, mod, block_mask),
        lambda q, k, v: textbook(q, k, v, keep=keep, softcap=1.5),
        [q, k, v],
        1e-5,
    )


def test_any_other_score_mod_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"score_mod: .*softcap\(cap\), scores.Alibi.*block_mask"):
        ours.flex_attention(*tensors(), alibi)  # type: ignore[arg-type]


# The signature, results and messages


def test_signature_is_that_of_torch() -> None:
    def of(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert of(ours.flex_attention) == of(theirs.flex_attention)


def test_return_aux() -> None:
    q, k, v = tensors()
    out, aux = ours.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    want, want_aux = theirs.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert type(aux) is type(want_aux)
    assert aux.max_scores is None
    assert_close(out, want)
    assert_close(aux.lse, want_aux.lse)
    assert ours.flex_attention(q, k, v, return_aux=AuxRequest())[1].lse is None
    with pytest.raises(NotImplementedError, match="max_scores"):
        ours.flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 1, 2), {"block_mask": "causal"}, TypeError, "block_mask: expected a BlockMask"),
        ((0, 3, 3), {}, ValueError, "without enable_gqa=True, got 4 and 2"),
        ((0, 1, 2), {"block_mask": 64}, TypeError, "block_mask"),
        ((0, 1, 2), {"return_lse": True, "return_aux": AuxRequest(lse=True)}, ValueError, "got both"),
    ],
)
def test_messages(
    arguments: tuple[int, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    available = [*tensors(), tensors(Hkv=2)[1]]
    with pytest.raises(error, match=message):
        ours.flex_attention(*(available[n] for n in arguments), **options)
    with pytest.raises(ValueError, match=r"BlockPatterns\(table\), block=\(16, 16\): expected"):
        ours.flex_attention(*tensors(31, 31), block_mask=block_mask_of(causal))
    with pytest.raises(ValueError, match=r"query: expected a tensor \(B, H, L, E\)"):
        ours.flex_attention(*(x[0] for x in tensors()))


# torch.compile, export, vmap and fake tensors


class Call(torch.nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.flex_attention(q, k, v, block_mask=self.mask)  # type: ignore[return-value]


converted = pytest.mark.parametrize("convert", [lambda x: x, masks.from_flex], ids=["BlockMask", "Mask"])


@converted
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_compile(name: str, convert: Callable[[BlockMask], Any]) -> None:
    torch._dynamo.reset()
    call, inputs = Call(convert(block_mask_of(MODS[name]))), [x.requires_grad_() for x in tensors()]
    out, want = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs)
    assert_close(out, want)
    pairs = torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(want.sum(), inputs)
    for grad, want_grad in zip(*pairs, strict=True):
        assert_close(grad, want_grad)


def test_compile_with_the_block_mask_made_inside() -> None:
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(causal, None, None, 73, 73, device="cpu", BLOCK_SIZE=16)
        return ours.flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]

    inputs = tensors()
    assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs))


@converted
def test_export(convert: Callable[[BlockMask], Any]) -> None:
    call, inputs = Call(convert(block_mask_of(documents))), tensors()
    assert_close(export(call, tuple(inputs)).module()(*inputs), call(*inputs))


@converted
def test_vmap(convert: Callable[[BlockMask], Any]) -> None:
    call, inputs = Call(convert(block_mask_of(documents))), tensors()
    out = torch.vmap(call)(*(torch.stack([x, 2 * x]) for x in inputs))
    assert_close(out, torch.stack([call(*inputs), call(*(2 * x for x in inputs))]))


def test_fake_tensors() -> None:
    inputs, real = tensors(), block_mask_of(causal)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in inputs]
        assert Call(block_mask_of(causal))(*fake).shape == (B, H, 73, DV)
        assert Call(real)(*fake).shape == (B, H, 73, DV)
    # The mask of the fake call is not kept.
    assert_close(Call(real)(*inputs), regard.attention(*inputs, mask=masks.Causal()))


def test_second_derivatives() -> None:
    block_mask = create_block_mask(causal, None, None, 5, 5, device="cpu", BLOCK_SIZE=2)
    inputs = [torch.randn(1, 1, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(Call(block_mask), inputs)
