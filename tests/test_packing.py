"""Tests of packed and jagged sequences: results match each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard import masks as M, packing, scores
from regard._api import packed as _packed
from support import assert_close

TRAINING = ["auto", "reference", "torch"]
HQ, HKV, D, DV = 4, 2, 7, 5
NAN = float("nan")
Options = dict[str, Any]

SELF = {
    "one": [13],
    "some": [3, 17, 1, 30],
    "with empty ones": [0, 5, 0, 0, 7, 0],
    "many tiny ones": [1, 2, 1, 3, 1, 1, 2, 4, 1, 1, 2, 1, 3],
    "nothing": [0, 0],
}
CROSS = {
    "more keys": ([3, 17, 1, 5], [9, 20, 4, 5]),
    "fewer keys": ([9, 20, 4], [3, 17, 1]),
    "without queries or keys": ([0, 5, 4, 0], [3, 0, 6, 0]),
    "decoding": ([1, 1, 1], [30, 7, 19]),
}
LENGTHS = {name: (n, n) for name, n in SELF.items()} | CROSS
# impl="auto" runs with all lengths, the other implementations with two of them.
TRAINED = [
    pytest.param(sizes, impl, id=f"{name}-{impl}")
    for name, sizes in LENGTHS.items()
    for impl in TRAINING
    if impl == "auto" or name in ("with empty ones", "without queries or keys")
]


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(sizes_q: list[int], sizes_k: list[int]) -> list[Tensor]:
    """Returns packed q (total_q, HQ, D), k (total_k, HKV, D) and v (total_k, HKV, DV)."""
    q, k = sum(sizes_q), sum(sizes_k)
    return [double(q, HQ, D), double(k, HKV, D, seed=1), double(k, HKV, DV, seed=2)]


def cu_seqlens_of(sizes: list[int]) -> Tensor:
    return packing.cu_seqlens(sizes)


MASKS: dict[str, M.Mask | None] = {
    "none": None,
    "causal": M.Causal(),
    "window": M.Window(3, 2),
    "dilated": M.Dilated(2) & M.Causal(),
    "not": ~M.Window(1, 1),
    "heads": M.PerHead([M.Causal(), M.Window(1, 0), M.Window(0, 4), ~M.Causal()]),
    "prefix": M.prefix_lm(4),
    "global": M.longformer((1, 1), [0, 2]),
    "random": M.RandomBlocks(1, 3, seed=5) | M.Window(1, 0),
}
OPTIONS: dict[str, Callable[[], Options]] = {
    "plain": dict,
    "alibi": lambda: {"bias": scores.Alibi.standard(HQ, dtype=torch.float64)},
    "relative": lambda: {"bias": scores.RelativeBias(double(8, HQ), max_distance=12)},
    "softcap": lambda: {"softcap": 2.0, "scale": 0.7},
    "sink": lambda: {"sink": double(HQ)},
    "offset": lambda: {"offset": 2},
}


def sequences(qkv: list[Tensor], sizes_q: list[int], sizes_k: list[int]) -> list[tuple[Tensor, ...]]:
    """Splits packed q, k, v into (q, k, v) of each sequence, each (H, L, D)."""
    split = [x.transpose(0, 1).split(n, 1) for x, n in zip(qkv, (sizes_q, sizes_k, sizes_k), strict=True)]
    return list(zip(*split, strict=True))


def by_sequence(qkv: list[Tensor], sizes_q: list[int], sizes_k: list[int], **options: Any) -> list[Any]:
    """Computes each sequence alone with the reference implementation."""
    split = sequences(qkv, sizes_q, sizes_k)
    return [regard.attention(*sequence, impl="reference", **options) for sequence in split]


def joined(outs: list[Tensor]) -> Tensor:
    """Packs the results of the sequences: (H, L, D) each -> (total, H, D)."""
    return torch.cat([out.transpose(0, 1) for out in outs])


# Results


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sizes", LENGTHS.values(), ids=LENGTHS)
def test_each_sequence_matches_the_sequence_alone(
    sizes: tuple[list[int], list[int]], mask: M.Mask | None
) -> None:
    qkv = tokens(*sizes)
    for make_options in OPTIONS.values():
        options = make_options()
        out = packing.varlen_attention(*qkv, *map(cu_seqlens_of, sizes), mask=mask, **options)
        assert_close(out, joined(by_sequence(qkv, *sizes, mask=mask, **options)), rtol=1e-10, atol=1e-10)
        assert out.is_contiguous()


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("mask", [M.Causal(), M.prefix_lm(4)], ids=["causal", "prefix"])
@pytest.mark.parametrize("sizes", LENGTHS.values(), ids=LENGTHS)
def test_lse(sizes: tuple[list[int], list[int]], mask: M.Mask, impl: str) -> None:
    qkv = tokens(*sizes)
    out, lse = packing.varlen_attention(
        *qkv, *map(cu_seqlens_of, sizes), mask=mask, return_lse=True, impl=impl
    )
    expected = by_sequence(qkv, *sizes, mask=mask, return_lse=True)
    assert_close(out, joined([o for o, _ in expected]), rtol=1e-10, atol=1e-10)
    assert_close(lse, torch.cat([x for _, x in expected], 1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("offset", [[0, 4, -2, 1], [5, 5, 5, 5], [0, -14, 0, 1]], ids=str)
def test_offset_per_sequence(offset: list[int], impl: str) -> None:
    sizes_q, sizes_k = CROSS["more keys"]
    qkv = tokens(sizes_q, sizes_k)
    out = packing.varlen_attention(
        *qkv,
        cu_seqlens_of(sizes_q),
        cu_seqlens_of(sizes_k),
        causal=True,
        offset=torch.tensor(offset),
        impl=impl,
    )
    alone = [
        regard.attention(*sequence, mask=M.Causal(), offset=start, impl="reference")
        for sequence, start in zip(sequences(qkv, sizes_q, sizes_k), offset, strict=True)
    ]
    assert_close(out, joined(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("shape", [(HQ, 1, 1), (1, "k"), ("q", 1), (HQ, "q", "k"), ("k",)], ids=str)
@pytest.mark.parametrize("name", ["some", "more keys"])
def test_bias_over_all_packed_tokens(name: str, shape: tuple[Any, ...], impl: str) -> None:
    sizes_q, sizes_k = LENGTHS[name]
    q, k, v = tokens(sizes_q, sizes_k)
    total = {"q": len(q), "k": len(k)}
    bias = double(*(total.get(n, n) for n in shape))
    out = packing.varlen_attention(
        q, k, v, cu_seqlens_of(sizes_q), cu_seqlens_of(sizes_k), causal=True, bias=bias, impl=impl
    )
    # Reference: one dense block-diagonal mask and the bias over all tokens.
    keep = torch.block_diag(
        *(M.Causal().to_dense(n, m).double() for n, m in zip(sizes_q, sizes_k, strict=True))
    )
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    expected = regard.attention(*heads_first, mask=keep.bool(), bias=bias, impl="reference")
    assert_close(out, expected.transpose(0, 1), rtol=1e-10, atol=1e-10)


def test_causal_and_window_are_masks() -> None:
    sizes_q, sizes_k = CROSS["more keys"]
    qkv, cu = tokens(sizes_q, sizes_k), (cu_seqlens_of(sizes_q), cu_seqlens_of(sizes_k))

    def equals(expected: M.Mask, **options: Any) -> bool:
        out = packing.varlen_attention(*qkv, *cu, **options)
        return torch.equal(out, packing.varlen_attention(*qkv, *cu, mask=expected))

    assert equals(M.Causal(), causal=True)
    assert equals(M.sliding(4), window=4)  # a number counts keys, the query's own included
    assert equals(M.sliding(1), window=1)
    assert equals(M.Window(3, 0), window=(3, 0))  # a pair gives distances
    assert equals(M.Window(None, 2), window=(None, 2))
    assert equals(M.Causal() & M.Window(3, 3) & M.Dilated(2), causal=True, window=(3, 3), mask=M.Dilated(2))


@pytest.mark.parametrize("mask", [M.Causal(), M.prefix_lm(3)], ids=["row", "one by one"])
def test_dropout_follows_the_seed(mask: M.Mask) -> None:
    sizes = [9, 0, 9, 30]
    q, k, v = tokens(sizes, sizes)
    q[9:18], k[9:18], v[9:18] = q[:9], k[:9], v[:9]

    def run(seed: int | None, impl: str = "auto") -> Tensor:
        return packing.varlen_attention(
            q, k, v, cu_seqlens_of(sizes), mask=mask, dropout=0.5, seed=seed, impl=impl
        )

    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))
    assert_close(run(3), run(3, "reference"), rtol=1e-10, atol=1e-10)
    assert not torch.equal(run(3)[:9], run(3)[9:18])  # equal sequences draw different patterns
    torch.manual_seed(1)
    first = run(None)
    torch.manual_seed(1)
    assert torch.equal(first, run(None))
    for wrong in (torch.tensor(3, device="meta"), 1.5, True):
        with pytest.raises((TypeError, ValueError), match=r"^seed: expected"):
            run(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("sizes", LENGTHS.values(), ids=LENGTHS)
def test_other_dtypes(sizes: tuple[list[int], list[int]], dtype: torch.dtype, rtol: float) -> None:
    qkv = [x.to(dtype) for x in tokens(*sizes)]
    out = packing.varlen_attention(*qkv, *map(cu_seqlens_of, sizes), causal=True)
    expected = joined(by_sequence([x.double() for x in qkv], *sizes, mask=M.Causal()))
    assert out.dtype is dtype
    assert_close(out.double(), expected, rtol=rtol, atol=rtol)


sizes_strategy = st.lists(st.integers(0, 24), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24)), min_size=1, max_size=8), st.booleans(),
       st.sampled_from(list(MASKS)))  # fmt: skip
def test_any_lengths(pairs: list[tuple[int, int]], square: bool, name: str) -> None:
    sizes_q = [n for n, _ in pairs]
    sizes_k = sizes_q if square else [m for _, m in pairs]
    qkv = tokens(sizes_q, sizes_k)
    out = packing.varlen_attention(*qkv, cu_seqlens_of(sizes_q), cu_seqlens_of(sizes_k), mask=MASKS[name])
    expected = joined(by_sequence(qkv, sizes_q, sizes_k, mask=MASKS[name]))
    assert_close(out, expected, rtol=1e-10, atol=1e-10)


# Gradients


def leaves(qkv: list[Tensor], options: Options) -> tuple[list[Tensor], Options]:
    """Copies q, k, v and the tensors of the options to leaves that require grad.

    Returns the leaves, and the options with their tensors replaced by leaves.
    """
    tensors = [x.detach().clone().requires_grad_() for x in qkv]
    new_options = dict(options)
    bias = options.get("bias")
    if isinstance(bias, scores.Alibi):
        tensors.append(bias.slopes.clone().requires_grad_())
        new_options["bias"] = scores.Alibi(tensors[-1])
    elif isinstance(bias, scores.RelativeBias):
        tensors.append(bias.table.clone().requires_grad_())
        new_options["bias"] = scores.RelativeBias(tensors[-1], max_distance=bias.max_distance)
    for name in ("sink", "bias"):
        if isinstance(options.get(name), Tensor):
            tensors.append(options[name].clone().requires_grad_())
            new_options[name] = tensors[-1]
    return tensors, new_options


@pytest.mark.parametrize("mask", [None, M.Causal(), M.Window(3, 2), M.prefix_lm(4)], ids=str)
@pytest.mark.parametrize(("sizes", "impl"), TRAINED)
def test_gradients_match_each_sequence_alone(
    sizes: tuple[list[int], list[int]], mask: M.Mask | None, impl: str
) -> None:
    qkv = tokens(*sizes)
    dout = double(len(qkv[0]), HQ, DV, seed=3)
    for name, make_options in OPTIONS.items():
        if impl == "torch" and name in ("softcap", "sink"):
            continue  # SDPA supports neither
        ours, options = leaves(qkv, make_options())
        out = packing.varlen_attention(*ours[:3], *map(cu_seqlens_of, sizes), mask=mask, impl=impl, **options)
        theirs, options = leaves(qkv, make_options())
        expected = joined(by_sequence(theirs[:3], *sizes, mask=mask, **options))
        assert_close(out, expected, rtol=1e-10, atol=1e-10)
        for grad, expected_grad in zip(
            torch.autograd.grad(out, ours, dout, allow_unused=True, materialize_grads=True),
            torch.autograd.grad(expected, theirs, dout, allow_unused=True, materialize_grads=True),
            strict=True,
        ):
            assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", TRAINING)
@pytest.mark.parametrize("shape", [(1, "k"), (HQ, "q", "k")], ids=str)
@pytest.mark.parametrize("name", ["some", "more keys"])
def test_gradient_of_a_bias_over_all_packed_tokens(name: str, shape: tuple[Any, ...], impl: str) -> None:
    sizes_q, sizes_k = LENGTHS[name]
    q, k, v = tokens(sizes_q, sizes_k)
    total = {"q": len(q), "k": len(k)}
    bias = double(*(total.get(n, n) for n in shape)).requires_grad_()
    cu = cu_seqlens_of(sizes_q), cu_seqlens_of(sizes_k)
    dout = double(len(q), HQ, DV, seed=3)
    out = packing.varlen_attention(q, k, v, *cu, causal=True, bias=bias, impl=impl)
    keep = torch.block_diag(
        *(M.Causal().to_dense(n, m).double() for n, m in zip(sizes_q, sizes_k, strict=True))
    )
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    expected = regard.attention(*heads_first, mask=keep.bool(), bias=bias, impl="reference").transpose(0, 1)
    assert_close(torch.autograd.grad(out, bias, dout)[0], torch.autograd.grad(expected, bias, dout)[0],
                 rtol=1e-9, atol=1e-9)  # fmt: skip


# One sequence cannot influence another

ISOLATED = {
    "row": (([5, 19, 40, 3, 16],) * 2, M.Causal()),
    "row, both sides": (([5, 19, 40, 3, 16],) * 2, None),
    "row, other keys": (([5, 19, 40, 3, 16], [9, 30, 2, 50, 1]), None),
    "one by one": (([5, 19, 40, 3, 16], [9, 30, 42, 50, 1]), M.Causal()),
}
CHANGED = 2  # the index of the disturbed sequence


def rows_of(sizes: list[int], inside: bool) -> Tensor:
    """Returns a mask (total,) of the tokens inside or outside the disturbed sequence."""
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return (ids == CHANGED) if inside else (ids != CHANGED)


def disturbed(x: Tensor, sizes: list[int], replacement: float | Tensor) -> Tensor:
    return torch.where(rows_of(sizes, True)[:, None, None], torch.as_tensor(replacement, dtype=x.dtype), x)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize(("sizes", "mask"), ISOLATED.values(), ids=ISOLATED)
@pytest.mark.parametrize("which", range(3), ids="qkv")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_of_one_sequence_do_not_reach_others(
    sizes: tuple[list[int], list[int]], mask: M.Mask | None, impl: str, which: int, dtype: torch.dtype
) -> None:
    qkv = [x.to(dtype) for x in tokens(*sizes)]
    token_sizes = (sizes[0], sizes[1], sizes[1])[which]
    others = rows_of(sizes[0], False)
    cu = [cu_seqlens_of(n) for n in sizes]
    before = packing.varlen_attention(*qkv, *cu, mask=mask, impl=impl)
    for replacement in (0.0, 1e4, -3.0, double(*qkv[which].shape, seed=9)):
        changed = [disturbed(x, token_sizes, replacement) if i == which else x for i, x in enumerate(qkv)]
        after = packing.varlen_attention(*changed, *cu, mask=mask, impl=impl)
        assert torch.equal(after[others], before[others])
        assert not torch.equal(after, before)


@pytest.mark.parametrize("impl", TRAINING)
@pytest.mark.parametrize(("sizes", "mask"), ISOLATED.values(), ids=ISOLATED)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dout"])
def test_gradients_of_one_sequence_do_not_reach_others(
    sizes: tuple[list[int], list[int]], mask: M.Mask | None, impl: str, which: int
) -> None:
    inputs = [*tokens(*sizes), double(sum(sizes[0]), HQ, DV, seed=3)]
    token_sizes = (sizes[0], sizes[1], sizes[1], sizes[0])
    others = [rows_of(n, False) for n in token_sizes]
    before = gradients(inputs, sizes, mask, impl)
    for replacement in (0.0, 1e4, double(*inputs[which].shape, seed=9)):
        changed = [
            disturbed(x, token_sizes[i], replacement) if i == which else x for i, x in enumerate(inputs)
        ]
        after = gradients(changed, sizes, mask, impl)
        assert all(torch.equal(a[o], b[o]) for a, b, o in zip(after, before, others, strict=False))
        assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def gradients(
    inputs: list[Tensor], sizes: tuple[list[int], list[int]], mask: Any, impl: str
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k and v."""
    qkv = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    out = packing.varlen_attention(*qkv, *map(cu_seqlens_of, sizes), mask=mask, impl=impl)
    return torch.autograd.grad(out, qkv, inputs[3])


# NaN and Inf. Rows that share a panel with a row that attends to a non-finite key are recomputed in
# double precision, so their rounding may differ. Sequences that are computed one by one share no
# panel.


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", ISOLATED)
@pytest.mark.parametrize("which", range(3), ids="qkv")
@pytest.mark.parametrize("poison", [NAN, float("inf")], ids=str)
def test_nan_in_one_sequence_does_not_reach_others(name: str, impl: str, which: int, poison: float) -> None:
    sizes, mask = ISOLATED[name]
    qkv, others = tokens(*sizes), rows_of(sizes[0], False)
    cu = [cu_seqlens_of(n) for n in sizes]
    before = packing.varlen_attention(*qkv, *cu, mask=mask, impl=impl)
    qkv[which] = disturbed(qkv[which], (sizes[0], sizes[1], sizes[1])[which], poison)
    after = packing.varlen_attention(*qkv, *cu, mask=mask, impl=impl)
    assert not after[~others].isfinite().all()
    assert_close(after[others], before[others], rtol=1e-14, atol=1e-14)
    assert torch.equal(after[others], before[others]) or name != "one by one"


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", ISOLATED)
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_nan_in_one_sequence_does_not_reach_gradients_of_others(name: str, impl: str, which: int) -> None:
    sizes, mask = ISOLATED[name]
    token_sizes = (sizes[0], sizes[1], sizes[1])
    inputs = [*tokens(*sizes), double(sum(sizes[0]), HQ, DV, seed=3)]
    before = gradients(inputs, sizes, mask, impl)
    inputs[which] = disturbed(inputs[which], token_sizes[which], NAN)
    after = gradients(inputs, sizes, mask, impl)
    assert not all(x.isfinite().all() for x in after)
    for a, b, n in zip(after, before, token_sizes, strict=True):
        others = rows_of(n, False)
        assert_close(a[others], b[others], rtol=1e-13, atol=1e-13)
        assert torch.equal(a[others], b[others]) or name != "one by one"


# cu_seqlens, pack and unpack


def test_cu_seqlens_lengths_and_positions() -> None:
    cu = packing.cu_seqlens(torch.tensor([3, 0, 2]))
    assert cu.dtype is torch.int32
    assert cu.tolist() == [0, 3, 3, 5]
    assert packing.lengths(cu).tolist() == [3, 0, 2]
    assert packing.positions(cu).tolist() == [0, 1, 2, 0, 1]
    assert packing.positions([0, 2]).dtype is torch.int64
    keep = torch.tensor([[False, True, True], [False, False, False], [True, False, True]])
    assert packing.cu_seqlens(keep=keep).tolist() == [0, 2, 2, 4]
    assert torch.equal(M.from_cu_seqlens(cu).q_ids, torch.tensor([0, 0, 0, 2, 2]))


LAYOUTS = {
    "(N, L)": ((), -1),
    "(N, L, E)": ((3,), -2),
    "(N, H, L, D)": ((2, 3), -2),
    "(N, L, H, D)": ((2, 3), -3),
}


def padded_batch(N: int, L: int, other_dims: tuple[int, ...], dim: int) -> Tensor:
    """Returns distinct non-zero numbers of shape (N, ..., L, ...), with L at `dim`."""
    shape = [N, *other_dims]
    shape.insert(len(shape) + dim + 1, L)
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 2), st.sampled_from(list(LAYOUTS)))
def test_pack_keeps_the_first_tokens_and_unpack_restores_them(
    sizes: list[int], padding: int, layout: str
) -> None:
    other_dims, dim = LAYOUTS[layout]
    L = max(sizes) + padding
    x = padded_batch(len(sizes), L, other_dims, dim)
    packed = packing.pack(x, sizes, dim=dim)
    assert torch.equal(packed, torch.cat([s.narrow(dim, 0, n) for s, n in zip(x, sizes, strict=True)], dim))
    unpacked = packing.unpack(packed, cu_seqlens_of(sizes), length=L, dim=dim)
    real = torch.arange(L) < torch.tensor(sizes)[:, None]
    tokens_first = x.movedim(dim, 1)
    assert torch.equal(
        unpacked.movedim(dim, 1), tokens_first * real.view(*real.shape, *(1,) * len(other_dims))
    )
    assert packing.unpack(packed, cu_seqlens_of(sizes), dim=dim).shape[dim] == max(sizes)
    assert torch.equal(packing.pack(unpacked, torch.tensor(sizes), dim=dim), packed)


@given(st.integers(1, 5), st.integers(0, 6), st.integers(0, 2**30 - 1), st.sampled_from(list(LAYOUTS)))
def test_keep_may_have_padding_anywhere(N: int, L: int, bits: int, layout: str) -> None:
    other_dims, dim = LAYOUTS[layout]
    keep = torch.tensor([(bits >> i) & 1 == 1 for i in range(N * L)], dtype=torch.bool).view(N, L)
    x = padded_batch(N, L, other_dims, dim)
    packed = packing.pack(x, keep=keep, dim=dim)
    tokens_first = x.movedim(dim, 1)
    assert torch.equal(packed.movedim(dim, 0), tokens_first[keep])
    unpacked = packing.unpack(packed, keep=keep, dim=dim)
    assert torch.equal(unpacked.movedim(dim, 1), tokens_first * keep.view(N, L, *(1,) * len(other_dims)))


def test_pack_and_unpack_have_gradients() -> None:
    sizes, cu = [2, 0, 3], cu_seqlens_of([2, 0, 3])
    for other_dims, dim in LAYOUTS.values():
        x = padded_batch(3, 4, other_dims, dim).double().requires_grad_()
        y = packing.pack(x, sizes, dim=dim).detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, dim=dim: packing.pack(x, sizes, dim=dim), x)
        assert torch.autograd.gradcheck(lambda y, dim=dim: packing.unpack(y, cu, length=4, dim=dim), y)
        assert torch.autograd.gradgradcheck(lambda x, dim=dim: packing.pack(x, sizes, dim=dim).square(), x)


def test_all_outputs_are_written(poison: None) -> None:
    x = packing.unpack(torch.ones(5, 2), [0, 2, 2, 5], length=4)
    assert x.sum() == 10
    sizes = [3, 0, 5]
    qkv = tokens(sizes, sizes)
    for mask in (M.Causal(), M.prefix_lm(2)):
        assert packing.varlen_attention(*qkv, cu_seqlens_of(sizes), mask=mask).isfinite().all()


def test_packed_attention_matches_a_padded_batch() -> None:
    """Pack, attend and unpack: real rows match attention over the padded batch."""
    sizes = torch.tensor([5, 0, 17, 8])
    q, k, v = double(4, HQ, 17, D), double(4, HKV, 17, D, seed=1), double(4, HKV, 17, DV, seed=2)
    cu = packing.cu_seqlens(sizes)
    packed = (packing.pack(x, sizes).transpose(0, 1) for x in (q, k, v))
    out = packing.unpack(packing.varlen_attention(*packed, cu, causal=True), cu, dim=-3).transpose(1, 2)
    padded = regard.attention(q, k, v, mask=M.Causal() & M.Lengths(sizes))
    real = (torch.arange(17) < sizes[:, None])[:, None, :, None]
    assert_close(out, torch.where(real, padded, 0.0), rtol=1e-10, atol=1e-10)


# Jagged nested tensors


def jagged(x: Tensor, cu: Tensor) -> Tensor:
    """Returns a jagged view as after a projection: (total, H, D) -> (N, H, j, D)."""
    return torch.nested.nested_tensor_from_jagged(x, cu).transpose(1, 2)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("mask", [None, M.Causal(), M.prefix_lm(4)], ids=str)
@pytest.mark.parametrize("sizes", LENGTHS.values(), ids=LENGTHS)
def test_jagged(sizes: tuple[list[int], list[int]], mask: M.Mask | None, impl: str) -> None:
    qkv = tokens(*sizes)
    cu_q, cu_k = (cu_seqlens_of(n).long() for n in sizes)
    q, k, v = jagged(qkv[0], cu_q), jagged(qkv[1], cu_k), jagged(qkv[2], cu_k.clone())
    bias = scores.Alibi.standard(HQ, dtype=torch.float64)
    options: Options = {"mask": mask, "bias": bias, "impl": impl}
    out, lse = regard.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = packing.varlen_attention(*qkv, cu_q, cu_k, return_lse=True, **options)
    assert out.shape == (*q.shape[:3], DV)
    assert lse.shape == q.shape[:3]
    assert torch.equal(out.values(), expected.transpose(0, 1))
    assert torch.equal(lse.values(), expected_lse)
    assert torch.equal(out.transpose(1, 2).flatten(-2).values(), expected.flatten(1))
    assert torch.equal(regard.attention(q, k, v, **options).values(), out.values())


@pytest.mark.parametrize("mask", [None, M.Causal(), M.prefix_lm(4)], ids=str)
@pytest.mark.parametrize(("sizes", "impl"), TRAINED)
def test_jagged_gradients(sizes: tuple[list[int], list[int]], mask: M.Mask | None, impl: str) -> None:
    """Splits and joins heads as a model does: (N, j, H * D) -> attention -> (N, j, H * Dv)."""
    qkv = tokens(*sizes)
    cu = [cu_seqlens_of(sizes[0]).long(), *[cu_seqlens_of(sizes[1]).long()] * 2]
    dout = double(len(qkv[0]), HQ * DV, seed=3)
    ours = [
        torch.nested.nested_tensor_from_jagged(x.flatten(1), offsets).requires_grad_()
        for x, offsets in zip(qkv, cu, strict=True)
    ]
    q, k, v = (x.unflatten(-1, y.shape[1:]).transpose(1, 2) for x, y in zip(ours, qkv, strict=True))
    out = regard.attention(q, k, v, mask=mask, impl=impl).transpose(1, 2).flatten(-2)
    grads = torch.autograd.grad(out.values(), ours, dout)
    theirs = [x.requires_grad_() for x in qkv]
    expected = joined(by_sequence(theirs, *sizes, mask=mask)).flatten(1)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, theirs, dout), strict=True):
        assert grad.is_nested
        assert_close(grad.values(), expected_grad.flatten(1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", TRAINING)
def test_jagged_sequences_do_not_reach_each_other(impl: str) -> None:
    sizes = [5, 19, 40, 3]
    qkv, cu = tokens(sizes, sizes), cu_seqlens_of(sizes).long()
    others = rows_of(sizes, False)

    def result(inputs: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        q, k, v = (jagged(x, cu) for x in leaves)
        out = regard.attention(q, k, v, mask=M.Causal(), impl=impl)
        out.values().square().sum().backward()
        return [out.values().transpose(0, 1)[others], *(x.grad[others] for x in leaves if x.grad is not None)]

    before = result(qkv)
    after = result([disturbed(x, sizes, 7.0) for x in qkv])
    assert len(before) == 4
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


# Cached plans and compilation


def test_a_plan_built_in_inference_mode_supports_backward() -> None:
    sizes = [4, 11, 2]
    qkv, cu_seqlens = tokens(sizes, sizes), (0, 4, 15, 17)
    with torch.inference_mode():
        packing.varlen_attention(*qkv, list(cu_seqlens), causal=True)
    hits = _packed._plan.cache_info().hits
    plan = _packed._plan(cu_seqlens, cu_seqlens, M.Causal(), None, False, torch.device("cpu"))
    assert _packed._plan.cache_info().hits == hits + 1
    assert plan.row is not None
    assert not any(x.is_inference() for x in plan.row.lower().tensors)


def test_fake_tensors() -> None:
    """Fake tensors give shapes without reading cu_seqlens, and no fake tensor is cached."""
    sizes = [4, 11, 3]
    qkv, cu = tokens(sizes, sizes), cu_seqlens_of(sizes)
    with FakeTensorMode() as mode:
        fake, fake_cu = [mode.from_tensor(x) for x in qkv], mode.from_tensor(cu)
        out = packing.varlen_attention(*fake, fake_cu, causal=True)
        assert out.shape == (18, HQ, DV)
        assert packing.varlen_attention(*fake, fake_cu, fake_cu + 0).shape == out.shape
        for options in ({"offset": 1, "causal": True}, {"mask": M.Prefix(1)}):
            with pytest.raises(NotImplementedError, match=r"cannot be read under torch\.compile"):
                packing.varlen_attention(*fake, fake_cu, **options)
    expected = joined(by_sequence(qkv, sizes, sizes, mask=M.Causal()))
    assert_close(packing.varlen_attention(*qkv, cu, causal=True), expected, rtol=1e-10, atol=1e-10)


def test_compiles_in_one_graph() -> None:
    torch._dynamo.reset()

    def varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return packing.varlen_attention(q, k, v, cu, causal=True) * 2

    def nested(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        qkv_jagged = (jagged(x, cu) for x in (q, k, v))
        return regard.attention(*qkv_jagged, mask=M.Causal()).values().transpose(0, 1) * 2

    for function in (varlen, nested):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for sizes in ([3, 17, 5], [9, 2, 4, 11]):
            qkv, cu = [x.requires_grad_() for x in tokens(sizes, sizes)], cu_seqlens_of(sizes).long()
            out, expected = compiled(*qkv, cu), function(*qkv, cu)
            assert torch.equal(out, expected)
            dout = double(*out.shape, seed=3)
            for grad, expected_grad in zip(
                torch.autograd.grad(out, qkv, dout), torch.autograd.grad(expected, qkv, dout), strict=True
            ):
                assert torch.equal(grad, expected_grad)


def test_cu_seqlens_may_change_in_place() -> None:
    qkv, cu = tokens([10], [10]), torch.tensor([0, 4, 10])
    packing.varlen_attention(*qkv, cu, causal=True)
    cu[1] = 7
    out = packing.varlen_attention(*qkv, cu, causal=True)
    assert_close(out, joined(by_sequence(qkv, [7, 3], [7, 3], mask=M.Causal())), rtol=1e-10, atol=1e-10)


# Messages

Q = torch.zeros(5, 2, 4)
CU = torch.tensor([0, 2, 5])
KEEP = torch.ones(2, 2) > 0
attend = packing.varlen_attention


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attend(Q[0], Q, Q, CU), ValueError, r"q: expected a tensor \(total, H, D\)"),
        (lambda: attend(Q, Q, [1], CU), ValueError, r"v: expected a tensor"),
        (lambda: attend(Q, Q, Q, CU[:2]), ValueError, r"q: expected 2 tokens.*got 5"),
        (lambda: attend(Q, Q, Q, CU, [0, 1, 2]), ValueError, r"k: expected 2 tokens.*got 5"),
        (lambda: attend(Q, Q, Q[1:], CU), ValueError, r"v: expected 5 tokens.*got 4"),
        (lambda: attend(Q, Q, Q, CU, [0, 5]), ValueError, "cu_seqlens_k: expected the shape of cu_seqlens_q"),
        (lambda: attend(Q, Q, Q, CU + 1), ValueError, "expected to start with 0"),
        (lambda: attend(Q, Q, Q, [0, 6, 5]), ValueError, "not decrease"),
        (lambda: attend(Q, Q, Q, CU.float()), ValueError, r"cu_seqlens_q: expected integers"),
        (lambda: attend(Q, Q, Q, CU, None, mask=M.Lengths(2)), TypeError, "any length"),
        (lambda: attend(Q, Q, Q, CU, mask=M.Documents([0] * 5)), TypeError, "any length"),
        (lambda: attend(Q, Q, Q, CU, mask=M.Dense(Q[0] > 0)), TypeError, "any length"),
        (lambda: attend(Q, Q, Q, CU, mask=Q[0] > 0), TypeError, "from_cu_seqlens"),
        (lambda: attend(Q, Q, Q, CU, window=-1), ValueError, "window: expected an integer from 1"),
        (lambda: attend(Q, Q, Q, CU, window=0), ValueError, "window: expected an integer from 1"),
        (lambda: attend(Q, Q, Q, CU, window=(-1, 0)), ValueError, r"Window\(left\).* None for no limit"),
        (lambda: attend(Q, Q, Q, CU, window=(1, 2, 3)), ValueError, r"window: .* \(left, right\), got"),
        (lambda: attend(Q, Q, Q, CU, offset=0.5), TypeError, "offset: expected an int"),
        (lambda: attend(Q, Q, Q, CU, offset=True), TypeError, "offset: expected an int"),
        (lambda: attend(Q, Q, Q, CU, offset=CU), ValueError, r"offset: expected shape \(N,\) = \(2,\)"),
        (lambda: attend(Q, Q, Q, CU, bias=Q, mask=M.Prefix(1)), ValueError, "bias: expected a shape"),
        (lambda: attend(Q, Q, Q, CU, bias=Q), ValueError, "bias: expected a shape"),
        (lambda: attend(Q, Q, Q.double(), CU), TypeError, "v: expected q's dtype"),
        (lambda: packing.cu_seqlens(), TypeError, "lengths, keep: expected one of them, got neither"),
        (lambda: packing.cu_seqlens([1], keep=KEEP), TypeError, "keep: expected one of them, got both"),
        (lambda: packing.cu_seqlens([2, -1]), ValueError, "lengths: expected integers >= 0, got -1"),
        (lambda: packing.cu_seqlens([0.5]), ValueError, "lengths: expected integers"),
        (lambda: packing.cu_seqlens(keep=Q[0]), TypeError, "keep: expected a bool .* True = real token"),
        (lambda: packing.lengths([0, 3, 2]), ValueError, "not decrease"),
        (lambda: packing.positions([1, 2]), ValueError, "expected to start with 0"),
        (lambda: packing.pack(Q, [2, 1]), ValueError, r"lengths: expected 5 integers up to L = 2"),
        (lambda: packing.pack(Q, [3] * 5), ValueError, r"up to L = 2, got \[3, 3, 3, 3, 3\]"),
        (lambda: packing.pack(Q, keep=torch.ones(5, 3) > 0), ValueError, r"keep: expected shape .* \(5, 2\)"),
        (lambda: packing.pack(Q, [1] * 5, dim=0), ValueError, r"dim: expected one of 1, \.\.\., 2"),
        (lambda: packing.pack(Q, [1] * 5, dim=3), ValueError, "dim: expected one of"),
        (lambda: packing.pack([1], [1]), TypeError, "x: expected a tensor"),
        (lambda: packing.unpack(Q, CU, dim=1), ValueError, "cu_seqlens: expected 2 tokens, as in dim 1 of x"),
        (lambda: packing.unpack(Q, CU, length=2, dim=0), ValueError, "up to L = 2"),
        (lambda: packing.unpack(Q, CU, length=-1, dim=0), ValueError, "length: expected"),
        (lambda: packing.unpack(Q), TypeError, "cu_seqlens, keep: expected one of them, got neither"),
        (lambda: packing.unpack(Q, keep=KEEP, dim=0), ValueError, "keep: expected 5 tokens"),
        (lambda: packing.unpack(Q, keep=KEEP, length=3), TypeError, "length: expected None with keep, got 3"),
        (lambda: packing.unpack(Q, CU, keep=KEEP, dim=0), TypeError, "keep: expected one of them, got both"),
    ],
)  # fmt: skip
def test_messages(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_jagged_messages() -> None:
    cu = CU.clone()
    flat = torch.nested.nested_tensor_from_jagged(Q, cu)  # (N, j, H, D)
    x = flat.transpose(1, 2)
    holes = torch.nested.nested_tensor_from_jagged(Q, cu, torch.tensor([1, 3]), jagged_dim=1).transpose(1, 2)
    three = torch.nested.nested_tensor_from_jagged(Q, torch.tensor([0, 2, 3, 5])).transpose(1, 2)
    other = torch.nested.nested_tensor_from_jagged(Q, torch.tensor([0, 3, 5])).transpose(1, 2)
    dense = torch.zeros(2, 2, 3, 4)
    cases = [
        ((flat, flat, flat), {}, ValueError, r"q: expected \(N, H, j, D\) with ragged j"),
        ((x, flat, x), {}, ValueError, r"k: expected \(N, H, j, D\)"),
        ((x.flatten(1, 1), x, dense), {}, TypeError, "v: expected a nested tensor of layout torch.jagged"),
        ((dense, x, x), {}, TypeError, "k: expected a dense"),
        ((holes, holes, holes), {}, ValueError, "q: expected no holes"),
        ((x, three, three), {}, ValueError, "k: expected 2 sequences as in q, got 3"),
        (
            (x, x, other),
            {},
            ValueError,
            r"v: expected sequences as long as those of k, \[2, 3\], got \[3, 2\]",
        ),
        ((x, x, x), {"bias": torch.zeros(2, 1, 1)}, TypeError, "bias: expected scores.Alibi"),
        ((x, x, x), {"mask": torch.ones(1, 1) > 0}, TypeError, "mask: expected a mask that applies"),
    ]
    for qkv, options, error, message in cases:
        with pytest.raises(error, match=message):
            regard.attention(*qkv, **options)
    for function in (regard.weights, regard.plan):
        with pytest.raises(TypeError, match="q: expected a dense"):
            function(x, x, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_strided_nested_tensors_are_rejected() -> None:
    x = torch.nested.nested_tensor([torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)])
    with pytest.raises(TypeError, match=r"q: expected a dense .* layout=torch\.jagged"):
        regard.attention(x, x, x)
