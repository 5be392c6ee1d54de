"""`compat.xformers` against the formula of xFormers' documentation, in float64.

xFormers itself needs a GPU. The masks are written here as the sentences of its docstrings, pair by pair.
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

from regard.compat import xformers as X
from support import assert_close
from support.compat import check_against, textbook

B, G, H, K, KV = 2, 3, 2, 8, 5
SIZES = [(7, 7), (5, 11), (11, 5)]
Allowed = Callable[[int, int, int, int], bool]  # (query, key, number of queries, number of keys)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec. is deprecated:FutureWarning"),
]


def everything(q: int, k: int, Mq: int, Mk: int) -> bool:
    return True


def causal(q: int, k: int, Mq: int, Mk: int) -> bool:
    """A query cannot attend to a key which is farther from the initial key than q from the initial query."""
    return k <= q


def bottom_right(q: int, k: int, Mq: int, Mk: int) -> bool:
    """A query cannot attend to a key which is nearer the final key than it is to the final query."""
    return Mk - 1 - k >= Mq - 1 - q


def local(window: int) -> Allowed:
    """In a block, query i attends to keys above i - window up to i."""
    return lambda q, k, Mq, Mk: q - window < k <= q


def local_bottom_right(window: int) -> Allowed:
    """Distances to the final key from x to x + window - 1, where x is the distance to the final query."""
    return lambda q, k, Mq, Mk: Mq - 1 - q <= Mk - 1 - k < Mq - 1 - q + window


def both_sides(left: int, right: int) -> Allowed:
    """q - window_left <= k + s <= q + window_right, with s = number of queries - number of keys."""
    return lambda q, k, Mq, Mk: q - left <= k + Mq - Mk <= q + right


def matrix(allowed: Allowed, Mq: int, Mk: int) -> Tensor:
    return torch.tensor([[allowed(q, k, Mq, Mk) for k in range(Mk)] for q in range(Mq)], dtype=torch.bool)


def tensors(layout: int, Mq: int, Mk: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    heads = {3: (), 4: (H,), 5: (G, H)}[layout]
    sizes = (Mq, K), (Mk, K), (Mk, KV)
    return [torch.randn(B, M, *heads, C, dtype=dtype) for M, C in sizes]


def expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Computes attention of (B, M, ..., K) by the textbook formula."""
    flat = [x.reshape(*x.shape[:2], -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v)]
    return textbook(*flat, **options).transpose(1, 2).reshape(*q.shape[:-1], v.shape[-1])


SINGLE: dict[str, tuple[Callable[[], X.AttentionBias | None], Allowed]] = {
    "none": (lambda: None, everything),
    "lower triangular": (X.LowerTriangularMask, causal),
    "bottom right": (X.LowerTriangularFromBottomRightMask, bottom_right),
    "bottom right, local": (
        lambda: X.LowerTriangularFromBottomRightMask().make_local_attention(3),
        local_bottom_right(3),
    ),
    "both sides": (lambda: X.LocalAttentionFromBottomRightMask(2, 1), both_sides(2, 1)),
}


@pytest.mark.parametrize("layout", [3, 4, 5])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SINGLE)
def test_biases_of_whole_samples(name: str, size: tuple[int, int], layout: int) -> None:
    make, allowed = SINGLE[name]
    keep, bias = matrix(allowed, *size), make()
    check_against(
        lambda q, k, v: X.memory_efficient_attention(q, k, v, bias, scale=0.4),
        lambda q, k, v: expected(q, k, v, keep=keep, scale=0.4),
        tensors(layout, *size),
        1e-5,
    )
    if bias is not None:
        want = torch.zeros(B, *size).masked_fill(~keep, float("-inf"))
        assert torch.equal(bias.to("cpu").materialize((B, *size)), want)
        assert bias.materialize(size, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", [3, 4, 5])
@pytest.mark.parametrize("triangle", [False, True])
def test_tensors_as_bias(triangle: bool, layout: int, size: tuple[int, int]) -> None:
    heads = {3: (), 4: (H,), 5: (G, H)}[layout]
    bias = torch.randn(B, *heads, *size)
    flat = bias.reshape(B, -1, *size).shape

    def ours(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return X.memory_efficient_attention(q, k, v, X.LowerTriangularMask().add_bias(x) if triangle else x)

    check_against(
        ours,
        lambda q, k, v, x: expected(
            q, k, v, bias=x.reshape(flat), keep=matrix(causal if triangle else everything, *size)
        ),
        [*tensors(layout, *size), bias],
        1e-5,
    )


PACKED: dict[str, tuple[Callable[[list[int], list[int]], X.BlockDiagonalMask], Allowed]] = {
    "whole": (X.BlockDiagonalMask.from_seqlens, everything),
    "causal": (lambda q, k: X.BlockDiagonalMask.from_seqlens(q, k).make_causal(), causal),
    "causal class": (X.BlockDiagonalCausalMask.from_seqlens, causal),
    "bottom right": (
        lambda q, k: X.BlockDiagonalMask.from_seqlens(q, k).make_causal_from_bottomright(),
        bottom_right,
    ),
    "local": (lambda q, k: X.BlockDiagonalMask.from_seqlens(q, k).make_local_attention(3), local(3)),
    "local bottom right": (
        lambda q, k: X.BlockDiagonalMask.from_seqlens(q, k).make_local_attention_from_bottomright(3),
        local_bottom_right(3),
    ),
}
LENGTHS = [
    ([3, 5, 2], [3, 5, 2]),
    ([3, 1, 2], [4, 5, 2]),
    ([2, 3], [5, 6]),
    ([4], [7]),
    ([0, 3, 1], [2, 3, 1]),
]


def packed_keep(allowed: Allowed, q_lens: list[int], k_lens: list[int], spaces: list[int]) -> Tensor:
    keep = torch.zeros(sum(q_lens), sum(spaces), dtype=torch.bool)
    for n, (Mq, Mk) in enumerate(zip(q_lens, k_lens, strict=True)):
        a, c = sum(q_lens[:n]), sum(spaces[:n])
        keep[a : a + Mq, c : c + Mk] = matrix(allowed, Mq, Mk).reshape(Mq, Mk)
    return keep


def check_packed(bias: X.AttentionBias, keep: Tensor, layout: int = 4) -> None:
    size = tuple(keep.shape)
    check_against(
        lambda q, k, v: X.memory_efficient_attention(q, k, v, bias),
        lambda q, k, v: expected(q, k, v, keep=keep),
        [x[:1] for x in tensors(layout, *size)],
        1e-5,
    )
    want = torch.zeros(1, H, *size).masked_fill(~keep, float("-inf"))
    assert torch.equal(bias.materialize((1, H, *size)), want)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name: str, lengths: tuple[list[int], list[int]]) -> None:
    make, allowed = PACKED[name]
    check_packed(make(*lengths), packed_keep(allowed, *lengths, lengths[1]), 5 if name == "causal" else 4)


PADDED: dict[str, tuple[Callable[..., X.AttentionBias], Allowed, tuple[int, ...]]] = {
    "whole": (X.BlockDiagonalPaddedKeysMask.from_seqlens, everything, ()),
    "causal": (X.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens, bottom_right, ()),
    "local": (
        X.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local,
        local_bottom_right(3),
        (3,),
    ),
    "both sides": (X.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local, both_sides(2, 1), (2, 1)),
}


@pytest.mark.parametrize(
    "lengths", [([1, 1, 1], [2, 7, 4]), ([2, 2], [2, 7]), ([3, 1, 2], [7, 1, 5])], ids=str
)
@pytest.mark.parametrize("name", PADDED)
def test_padded_keys(name: str, lengths: tuple[list[int], list[int]]) -> None:
    make, allowed, window = PADDED[name]
    q_lens, k_lens = lengths
    check_packed(make(q_lens, 7, k_lens, *window), packed_keep(allowed, q_lens, k_lens, [7] * len(q_lens)))


def test_a_decode_step_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query for each sequence of a padded cache runs as a batch, without copies of the cache."""
    calls = []
    monkeypatch.setattr(
        X, "attention", lambda q, k, v, **o: calls.append((q.shape, k.data_ptr())) or v[:, :, :1]
    )
    q, k, v = torch.randn(1, 3, H, K), torch.randn(1, 21, H, K), torch.randn(1, 21, H, K)
    bias = X.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 1, 1], 7, [2, 7, 4])
    X.memory_efficient_attention(q, k, v, bias)
    assert calls == [((3, H, 1, K), k.data_ptr())]


@pytest.mark.parametrize("expanded", [False, True])
def test_heads_of_a_group_share_their_keys(expanded: bool) -> None:
    q, k, v = tensors(5, 7, 7)
    k, v = (x[:, :, :, :1].clone() for x in (k, v))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.expand(-1, -1, -1, H, -1) if expanded else x for x in (k, v))
        return X.memory_efficient_attention(q, k, v, X.LowerTriangularMask())

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.expand(-1, -1, -1, H, -1) for x in (k, v))
        return expected(q, k, v, keep=matrix(causal, 7, 7))

    check_against(ours, theirs, [q, k, v], 1e-5)


def test_an_expanded_leaf_gets_a_gradient_for_each_head() -> None:
    q, k, v = tensors(5, 7, 7)
    leaf = k[:, :, :, :1].expand(-1, -1, -1, H, -1).detach().requires_grad_()
    copy = leaf.detach().contiguous().requires_grad_()
    for x in (leaf, copy):
        X.memory_efficient_attention(q, x, v).square().sum().backward()
    assert leaf.grad is not None
    assert copy.grad is not None
    assert_close(leaf.grad, copy.grad)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, k, v = (x.repeat(64, 1, 1, 1) for x in tensors(4, 7, 7))
    dropped = X.memory_efficient_attention(q, k, v, p=0.5)
    exact = X.memory_efficient_attention(q, k, v)
    assert not torch.equal(dropped, exact)
    assert (dropped - exact).mean().abs() < 0.05
    mask = X.BlockDiagonalMask.from_seqlens([3, 4])
    torch.manual_seed(1)
    first = X.memory_efficient_attention(q[:1], k[:1], v[:1], mask, p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, X.memory_efficient_attention(q[:1], k[:1], v[:1], mask, p=0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    inputs = [x[:1].to(dtype) for x in tensors(4, 10, 10)]
    bias = X.BlockDiagonalCausalMask.from_seqlens([4, 6])
    keep = packed_keep(causal, [4, 6], [4, 6], [4, 6])
    check_against(
        lambda q, k, v: X.memory_efficient_attention(q, k, v, bias),
        lambda q, k, v: expected(q, k, v, keep=keep),
        inputs,
        1e-12 if dtype is torch.float64 else 1e-2,
    )


def test_lists_of_tensors_are_packed_and_split() -> None:
    parts = [torch.randn(1, 3, H, K), torch.randn(2, 6, H, K), torch.randn(1, 2, H, K)]
    bias, x = X.BlockDiagonalMask.from_tensor_list(parts)
    assert x.shape == (1, 17, H, K)
    assert bias.q_seqinfo.seqstart_py == [0, 3, 9, 15, 17] == bias.q_seqinfo.seqstart.tolist()
    assert (bias.q_seqinfo.max_seqlen, bias.q_seqinfo.min_seqlen) == (6, 2)
    for y, part in zip(bias.make_causal().split(x), parts, strict=True):
        assert torch.equal(y, part)
    out = bias.split(X.memory_efficient_attention(x, x, x, bias))
    for y, part in zip(out, parts, strict=True):
        assert_close(y, expected(part, part, part))
    keys = [torch.randn(len(x), 4, H, K) for x in parts]
    bias, q, k, v = X.BlockDiagonalMask.from_tensor_lists_qkv(parts, keys, keys)
    assert v is not None
    assert torch.equal(k, v)
    out = bias.split_queries(X.memory_efficient_attention(q, k, v, bias))
    for y, part, key in zip(out, parts, keys, strict=True):
        assert_close(y, expected(part, key, key))
    assert [x.shape[1] for x in bias.split_kv(k)] == [4, 4, 4]


def test_names_and_kinds_are_those_of_xformers() -> None:
    parameters = inspect.signature(X.memory_efficient_attention).parameters.values()
    assert [(p.name, p.default) for p in parameters if p.default is not p.empty] == [
        ("attn_bias", None), ("p", 0.0), ("scale", None), ("op", None),
    ]  # fmt: skip
    assert [p.name for p in parameters][:3] == ["query", "key", "value"]
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["op"]
    assert issubclass(X.BlockDiagonalCausalLocalAttentionMask, X.BlockDiagonalCausalMask)
    assert issubclass(X.BlockDiagonalCausalWithOffsetPaddedKeysMask, X.BlockDiagonalPaddedKeysMask)
    assert issubclass(X.LowerTriangularMaskWithTensorBias, X.LowerTriangularMask)
    for name in X.__all__:
        assert getattr(X, name).__doc__


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q: X.memory_efficient_attention(q[0, 0], q, q), ValueError, r"query: expected \(B, M, K\)"),
        (lambda q: X.memory_efficient_attention(q, q[0], q), ValueError, "key: expected"),
        (lambda q: X.memory_efficient_attention(q, q, q, "causal"), TypeError, "attn_bias: expected a float"),
        (
            lambda q: X.memory_efficient_attention(q, q, q, torch.zeros(7, 7)),
            ValueError,
            r"attn_bias: expected \(B, H, Mq, Mk\)",
        ),
        (
            lambda q: X.memory_efficient_attention(q, q, q, X.BlockDiagonalMask.from_seqlens([3, 4])),
            ValueError,
            "expected B = 1 with a BlockDiagonalMask, got 2",
        ),
        (
            lambda q: X.memory_efficient_attention(*[q[:1]] * 3, X.BlockDiagonalMask.from_seqlens([3])),
            ValueError,
            r"attn_bias: expected Mq, Mk = \(3, 3\), as in its lengths, got \(7, 7\)",
        ),
        (
            lambda q: X.BlockDiagonalMask.from_seqlens([3], [1, 2]),
            ValueError,
            "kv_seqlen: expected 1 lengths",
        ),
        (
            lambda q: X.BlockDiagonalCausalFromBottomRightMask.from_seqlens([3], [2]),
            ValueError,
            "sequence 0: expected at least 3 keys",
        ),
        (
            lambda q: X.BlockDiagonalMask.from_seqlens([9], [2]).make_local_attention(3),
            RuntimeError,
            "window_size: expected a key for each query",
        ),
        (
            lambda q: X.LowerTriangularFromBottomRightMask().make_local_attention(0),
            ValueError,
            "window_size: expected",
        ),
        (lambda q: X.LocalAttentionFromBottomRightMask(-1, 0), ValueError, r"Window\(left\)"),
        (
            lambda q: X.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [5]),
            ValueError,
            "kv_seqlen: expected lengths up to kv_padding = 4",
        ),
        (lambda q: X.BlockDiagonalMask.from_seqlens([3], [4]).split(q), ValueError, "call split_queries"),
        (
            lambda q: X.BlockDiagonalMask.from_seqlens([3]).split(q),
            ValueError,
            r"tensor: expected \(1, 3, ...\)",
        ),
    ],
)
def test_messages(call: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(2, 7, H, K))


# torch.compile, export, vmap and fake tensors

TRACED: dict[str, tuple[Callable[[], X.AttentionBias], int]] = {
    "triangle": (X.LowerTriangularMask, 7),
    "bias": (lambda: X.LowerTriangularMaskWithTensorBias(torch.ones(1, 1, 1, 7)), 7),
    "packed": (lambda: X.BlockDiagonalMask.from_seqlens([3, 4]).make_causal(), 7),
    "cross": (lambda: X.BlockDiagonalMask.from_seqlens([3, 4], [5, 4]).make_causal_from_bottomright(), 9),
    "padded": (
        lambda: X.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1] * 7, 3, [2] * 6 + [3]),
        21,
    ),
}
traced = pytest.mark.parametrize("name", TRACED)


class Call(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.bias = TRACED[name][0]()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return X.memory_efficient_attention(q, k, v, self.bias)


def inputs_of(name: str) -> list[Tensor]:
    return [x[:1] for x in tensors(4, 7, TRACED[name][1])]


@traced
def test_compile(name: str) -> None:
    torch._dynamo.reset()
    call, inputs = Call(name), [x.requires_grad_() for x in inputs_of(name)]
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    want = call(*inputs)
    assert_close(out, want)
    for grad, want_grad in zip(
        torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(want.sum(), inputs), strict=True
    ):
        assert_close(grad, want_grad)


@traced
def test_export(name: str) -> None:
    call, inputs = Call(name), inputs_of(name)
    assert_close(export(call, tuple(inputs)).module()(*inputs), call(*inputs))


@traced
def test_vmap(name: str) -> None:
    call, inputs = Call(name), inputs_of(name)
    stacked = [torch.stack([x, 2 * x]) for x in inputs]
    out = torch.vmap(call)(*stacked)
    assert_close(out, torch.stack([call(*inputs), call(*(2 * x for x in inputs))]))


@traced
def test_fake_tensors(name: str) -> None:
    with FakeTensorMode() as mode:
        out = Call(name)(*(mode.from_tensor(x) for x in inputs_of(name)))
    assert out.shape == (1, 7, H, KV)
