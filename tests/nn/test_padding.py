"""NaN and Inf in padding: all gradients are finite and equal those with zeros in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks as M, packing
from regard.nn import (
    Attention,
    BigBirdAttention,
    DecoderBlock,
    EncoderBlock,
    EncoderDecoder,
    LatentAttention,
    LinearAttention,
    LinformerAttention,
    LinformerProjection,
    LongformerAttention,
    PerformerAttention,
    PostNorm,
    PreNorm,
    Stack,
)
from regard.nn._padding import finite_padding
from support import HAVE_CORE
from support.tracing import check_traced

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

B, L, D, HEADS = 3, 8, 16, 2
LENGTHS = torch.tensor([8, 5, 1])
REAL = torch.arange(L) < LENGTHS[:, None]
IDS = torch.where(REAL, torch.arange(L) // 3, -1)  # documents of 3 tokens, and padding
Call = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (module, x, context) -> output


def by_lengths(module: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return module(x, lengths=LENGTHS)


def by_mask(module: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return module(x, mask=M.Lengths(LENGTHS) & M.Causal())


def by_documents(module: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return module(x, mask=M.Documents(IDS))


def in_context(module: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return module(x.nan_to_num(0, 0, 0), context, mask=M.Lengths(LENGTHS))


def by_key_padding(module: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return module(x, x, x, key_padding_mask=~REAL)[0]


def by_float_key_padding(module: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    floats = torch.zeros(B, L).masked_fill(~REAL, -torch.inf)
    return module(*(x.transpose(0, 1),) * 3, key_padding_mask=floats, need_weights=False)[0].transpose(0, 1)


def in_keys(module: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return module(x.nan_to_num(0, 0, 0), context, 2 * context, key_padding_mask=M.Lengths(LENGTHS))[0]


def encoder_decoder() -> EncoderDecoder:
    encoder = Stack([EncoderBlock(D, HEADS) for _ in range(2)], nn.LayerNorm(D))
    return EncoderDecoder(encoder, Stack([DecoderBlock(D, HEADS, kv_model=D)], nn.LayerNorm(D)))


def translate(module: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return module(context, x.nan_to_num(0, 0, 0), source_mask=M.Lengths(LENGTHS))


def linformer() -> LinformerAttention:
    return LinformerAttention(D, HEADS, LinformerProjection(L, 4))


def latent(**options: Any) -> LatentAttention:
    return LatentAttention(D, HEADS, rank=8, nope_dim=6, rope_dim=4, q_rank=8, **options)


def pre_norm_with_gate() -> PreNorm:
    return PreNorm(D, Attention(D, HEADS, kv_heads=1, qk_norm=nn.RMSNorm, gate=True, sink=True))


MHA = regard.nn.MultiheadAttention
CASES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "Attention": (lambda: Attention(D, HEADS), by_lengths),
    "Attention, dropout": (lambda: Attention(D, HEADS, dropout=0.3), by_lengths),
    "Attention, mask": (lambda: Attention(D, HEADS), by_mask),
    "Attention, its own mask": (lambda: Attention(D, HEADS, mask=M.Lengths(LENGTHS)), lambda m, x, c: m(x)),
    "Attention, documents": (lambda: Attention(D, HEADS, mask=M.Causal()), by_documents),
    "Attention, context": (lambda: regard.nn.CrossAttention(D, heads=HEADS), in_context),
    "Attention, value": (
        lambda: Attention(D, HEADS, kv_model=D, value_model=D),
        lambda m, x, c: m(x.nan_to_num(0, 0, 0), c, c + 1, mask=M.Lengths(LENGTHS)),
    ),
    "LatentAttention": (latent, by_lengths),
    "LatentAttention, absorbed": (latent, lambda m, x, c: m(x, lengths=LENGTHS, absorb=True)),
    "LatentAttention, mask": (latent, by_mask),
    "LinearAttention": (lambda: LinearAttention(D, HEADS, decay="token", delta=True), by_lengths),
    "LinearAttention, gate": (lambda: LinearAttention(D, HEADS, causal=False, gate=True), by_lengths),
    "PerformerAttention": (lambda: PerformerAttention(D, HEADS, seed=0), by_lengths),
    "PerformerAttention, causal": (lambda: PerformerAttention(D, HEADS, causal=True, seed=0), by_lengths),
    "LinformerAttention": (linformer, by_lengths),
    "LinformerAttention, context": (
        linformer,
        lambda m, x, c: m(x.nan_to_num(0, 0, 0), c, lengths=LENGTHS),
    ),
    "LongformerAttention": (
        lambda: LongformerAttention(D, HEADS, window=3),
        lambda m, x, c: m(x, lengths=LENGTHS, global_tokens=[0]),
    ),
    "BigBirdAttention": (lambda: BigBirdAttention(D, HEADS, block=2), by_lengths),
    "BigBirdAttention, global_x": (
        lambda: BigBirdAttention(D, HEADS, block=2, global_blocks=()),
        lambda m, x, c: m(x, torch.ones(B, 2, D), lengths=LENGTHS)[0],
    ),
    "PreNorm": (pre_norm_with_gate, by_lengths),
    "PostNorm": (lambda: PostNorm(D, Attention(D, HEADS)), by_mask),
    "Block": (lambda: EncoderBlock(D, HEADS), by_lengths),
    "Block, PostNorm": (lambda: EncoderBlock(D, HEADS, residual=PostNorm), by_documents),
    "Stack": (lambda: Stack([DecoderBlock(D, HEADS) for _ in range(2)], nn.RMSNorm(D)), by_lengths),
    "EncoderDecoder": (encoder_decoder, translate),
    "MultiheadAttention": (lambda: MHA(D, HEADS, batch_first=True), by_key_padding),
    "MultiheadAttention, float": (lambda: MHA(D, HEADS), by_float_key_padding),
    "MultiheadAttention, keys": (lambda: MHA(D, HEADS, batch_first=True, kdim=D, vdim=D), in_keys),
}


def gradients(call: Call, module: nn.Module, tokens: Tensor, context: Tensor) -> list[Tensor]:
    """Returns the output of real tokens, and the gradients of its loss."""
    torch.manual_seed(1)
    x, context = tokens.clone().requires_grad_(), context.clone().requires_grad_()
    out = call(module, x, context)[REAL]
    leaves = [x, context, *module.parameters()]
    return [
        out,
        *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True),
    ]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_with_zeros_in_the_padding(name: str, value: float) -> None:
    torch.manual_seed(0)
    make, call = CASES[name]
    module, x, context = make(), torch.randn(B, L, D), torch.randn(B, L, D)
    padding = ~REAL[..., None]
    expected = gradients(call, module, x.masked_fill(padding, 0), context.masked_fill(padding, 0))
    actual = gradients(call, module, x.masked_fill(padding, value), context.masked_fill(padding, value))
    assert any(bool(grad.any()) for grad in expected[1:])
    for ours, theirs in zip(actual, expected, strict=True):
        assert theirs.isfinite().all()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["Attention", "LatentAttention", "Stack", "MultiheadAttention"])
def test_finite_padding_and_real_tokens_stay(name: str) -> None:
    make, call = CASES[name]
    module, x = make(), torch.randn(B, L, D)
    changed = x.clone()
    changed[1, 6] += 1
    before, after = call(module, x, x), call(module, changed, x)
    assert not torch.equal(before[1, 6], after[1, 6])  # the rows of padding are computed from the padding
    assert torch.equal(before[REAL], after[REAL])
    changed[1, 2] = torch.nan
    assert call(module, changed, x)[1, 2].isnan().any()


def packed(module: nn.Module, x: Tensor, layout: torch.layout | None) -> Tensor:
    """Applies an attention layer to the real tokens, packed or as a nested tensor."""
    if layout is None:
        return module(packing.pack(x, LENGTHS), cu_seqlens=packing.cu_seqlens(LENGTHS))
    sequences = [s[:n] for s, n in zip(x, LENGTHS.tolist(), strict=True)]
    return torch.cat(module(torch.nested.as_nested_tensor(sequences, layout=layout)).unbind())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [None, torch.jagged, torch.strided])
def test_packed_and_nested_inputs_leave_the_padding_out(layout: torch.layout | None) -> None:
    module, x = Attention(D, HEADS), torch.randn(B, L, D)
    leaves = [x.masked_fill(~REAL[..., None], value).requires_grad_() for value in (0, torch.nan)]
    expected, actual = (
        torch.autograd.grad(packed(module, leaf, layout).square().sum(), [leaf, *module.parameters()])
        for leaf in leaves
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert theirs.any()


def test_contexts_of_other_masks_stay() -> None:
    """A mask that is not a conjunction with `Lengths`, or not about these tokens, declares nothing."""
    x = torch.full((B, L, D), torch.nan)
    for mask in (None, M.Causal(), M.Lengths(LENGTHS) | M.Causal(), M.Dense(REAL[:, None, None])):
        assert finite_padding(x, None, mask) is x
    assert finite_padding(x, None, M.Lengths([1, 2])) is x  # a wrong shape, for which attention raises
    with pytest.raises(ValueError, match=r"Lengths\(n\): expected shape broadcastable to batch"):
        Attention(D, HEADS)(x, lengths=torch.tensor([1, 2]))
    out = finite_padding(x, LENGTHS, M.Documents(torch.zeros(B, L, dtype=torch.long)))
    assert torch.equal(out.isnan().all(-1), REAL)
    ids = torch.tensor([0, 0, 0, 1, 1, -1, -1, -1])
    assert finite_padding(x, None, M.Documents(ids, ids) & M.Causal())[0].isnan().sum() == 5 * D


@pytest.mark.parametrize("name", ["Attention", "LatentAttention", "Block", "MultiheadAttention"])
def test_traced(name: str) -> None:
    torch._dynamo.reset()
    make, _ = CASES[name]
    module = make().eval()

    def call(x: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(L) >= lengths[:, None]
        x = x.masked_fill(padding[..., None], torch.nan)
        if name == "MultiheadAttention":
            return module(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return module(x, lengths=lengths)

    check_traced(call, [torch.randn(B, L, D), LENGTHS])
