"""Tests of `make`: shapes, strides, options, messages. Sizes are prime to expose swapped axes."""

from __future__ import annotations

import inspect
import itertools
import pickle
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard import masks, scores
from regard._call.make import make, specs
from regard._call.memory import MAX_SPECS
from regard._call.spec import Options

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 5, 7, 11, 13


def qkv(*batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (HQ, LQ, D), (HKV, LK, D), (HKV, LK, DV)
    q, k, v = (torch.randn(*batch, *size, dtype=dtype) for size in sizes)
    return q, k, v


# Shapes and strides


@pytest.mark.parametrize("batch", [(), (B,), (1,), (2, 3), (2, 1, 3)])
def test_ranks(batch: tuple[int, ...]) -> None:
    spec = make(*qkv(*batch)).spec
    assert spec.batch == batch
    assert spec.rank == 3 + len(batch)
    assert (spec.Hq, spec.Hkv, spec.Lq, spec.Lk, spec.D, spec.Dv) == (HQ, HKV, LQ, LK, D, DV)
    assert torch.Size(batch).numel() == spec.B
    assert spec.out_shape == (*batch, HQ, LQ, DV)
    assert spec.copied == ()


def test_textbook_form() -> None:
    spec = make(torch.randn(LQ, D), torch.randn(LK, D), torch.randn(LK, DV)).spec
    assert (spec.rank, spec.B, spec.Hq, spec.Hkv) == (2, 1, 1, 1)
    assert spec.q_stride == (0, 0, D, 1)
    assert spec.out_shape == (LQ, DV)


def read_4d(x: Tensor, stride: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Reads x as a kernel does with these strides."""
    return x.as_strided(shape, stride, x.storage_offset())


@pytest.mark.parametrize(
    "view", ["plain", "transposed", "sliced", "broadcast", "permuted batch", "part broadcast"]
)
def test_strides_read_the_right_numbers(view: str) -> None:
    k = {
        "plain": torch.randn(2, 3, HKV, LK, D),
        "transposed": torch.randn(2, 3, LK, HKV, D).transpose(2, 3),
        "sliced": torch.randn(2, 3, HKV, LK + 4, 2 * D)[..., 2:-2, ::2],
        "broadcast": torch.randn(1, 1, HKV, LK, D),
        "permuted batch": torch.randn(3, 2, HKV, LK, D).transpose(0, 1),
        "part broadcast": torch.randn(2, 1, HKV, LK, D),
    }[view]
    problem = make(torch.randn(2, 3, HQ, LQ, D), k, torch.randn(2, 3, HKV, LK, DV))
    spec = problem.spec
    assert spec.copied == (("k",) if view in ("permuted batch", "part broadcast") else ())
    read = read_4d(problem.k, spec.k_stride, (spec.B, HKV, LK, D))
    assert torch.equal(read, k.expand(2, 3, HKV, LK, D).reshape(6, HKV, LK, D))
    if not spec.copied:
        assert problem.k is k


@pytest.mark.parametrize(
    "shape", [(LK,), (1, LK), (LQ, 1), (LQ, LK), (1, HQ, 1, 1), (2, 1, 1, LQ, LK), (2, 3, HQ, LQ, LK)]
)
def test_bias_strides(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape)
    problem = make(*qkv(2, 3), Options(bias=bias))
    spec = problem.spec
    assert isinstance(problem.bias, Tensor)
    read = read_4d(problem.bias, spec.bias_stride, (6, HQ, LQ, LK))
    assert torch.equal(read, bias.expand(2, 3, HQ, LQ, LK).reshape(6, HQ, LQ, LK))


def order(x: Tensor) -> list[int]:
    return sorted(range(x.ndim), key=lambda d: -x.stride(d))


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("impl", ["auto", "reference", "torch"])
def test_output_has_the_memory_order_of_q(dims: tuple[int, ...], impl: str) -> None:
    back = [dims.index(d) for d in range(4)]
    q, k, v = qkv(B)
    q = q.permute(dims).contiguous().permute(back)
    out = regard.attention(q, k, v, impl=impl)
    assert order(out) == order(q)
    assert out.stride() == make(q, k, v).spec.out_stride
    assert out.dtype is q.dtype


def test_batch_dims_broadcast_between_q_k_and_v() -> None:
    q, k, v = qkv(B)
    out = regard.attention(q[:1], k, v[:1], impl="reference")
    full = regard.attention(q[:1].expand(B, -1, -1, -1), k, v[:1].expand(B, -1, -1, -1), impl="reference")
    assert torch.equal(out, full)
    assert make(q[:1], k, v[:1]).spec.q_stride[0] == 0


def test_lazily_negated_views() -> None:
    q, k, v = qkv(B)
    z = torch.complex(q, q).conj().imag
    assert z.is_neg()
    for _ in range(2):  # the second call reuses the Spec
        assert torch.equal(regard.attention(z, k, v), regard.attention(-q, k, v))
        assert torch.equal(regard.attention(torch.complex(q, q).imag, k, v), regard.attention(q, k, v))


# The cache of Specs


def test_a_repeated_call_is_not_checked_again() -> None:
    q, k, v = qkv(B)
    assert make(q, k, v).spec is make(q.clone(), k, v).spec
    assert (
        make(q, k, v, Options(mask=masks.Causal())).spec is make(q, k, v, Options(mask=masks.Causal())).spec
    )
    assert (
        make(q, k, v, Options(mask=masks.Causal())).spec
        is not make(q, k, v, Options(mask=masks.Window(2, 0))).spec
    )
    assert make(q, k, v, Options(offset=1)).spec is not make(q, k, v, Options(offset=2)).spec
    assert make(q, k, v, Options(scale=1)).spec is make(q, k, v, Options(scale=1.0)).spec


def test_the_cache_is_bounded() -> None:
    q, k, v = qkv(B)
    for i in range(MAX_SPECS + 10):
        make(q, k, v, Options(offset=i))
    assert len(specs) <= MAX_SPECS


def test_values_are_checked_on_every_call() -> None:
    q, k, v = qkv(B)
    make(q, k, v, Options(mask=masks.Lengths(torch.tensor([3, LK]))))
    with pytest.raises(ValueError, match="expected lengths up to Lk"):
        make(q, k, v, Options(mask=masks.Lengths(torch.tensor([3, LK + 1]))))


# Options


def test_defaults() -> None:
    spec = make(*qkv(B)).spec
    assert spec.offset == LK - LQ
    assert spec.scale == pytest.approx(D**-0.5)
    assert make(torch.randn(LQ, 0), torch.randn(LK, 0), torch.randn(LK, DV)).spec.scale == 1.0
    assert (spec.softcap, spec.sink, spec.dropout, spec.return_lse, spec.bias) == (
        None,
        False,
        0.0,
        False,
        "none",
    )


@pytest.mark.parametrize("scale", [0, -1.5, 3])
def test_any_finite_scale(scale: float) -> None:
    assert make(*qkv(B), Options(scale=scale)).spec.scale == float(scale)


def test_offsets() -> None:
    problem = make(*qkv(2, 3), Options(offset=torch.arange(6, dtype=torch.int32)))
    assert problem.spec.offset is None
    assert problem.offset is not None
    assert problem.offset.dtype is torch.int64
    assert problem.offset.tolist() == [0, 1, 2, 3, 4, 5]
    same = make(*qkv(2, 3), Options(offset=torch.arange(6).view(2, 3))).offset
    assert same is not None
    assert same.tolist() == [0, 1, 2, 3, 4, 5]
    assert make(*qkv(B), Options(offset=-4)).spec.offset == -4


def test_seeds() -> None:
    arguments = qkv(B)
    assert make(*arguments, Options(dropout=0.5, seed=5)).seed == 5
    assert make(*arguments, Options(dropout=0.5, seed=torch.tensor(5))).seed == 5
    assert make(*arguments, Options(dropout=0.5, seed=2**64 - 1)).seed == -1
    assert make(*arguments, Options(seed=5)).seed == 5
    torch.manual_seed(3)
    first = make(*arguments, Options(dropout=0.5)).seed
    assert make(*arguments, Options(dropout=0.5)).seed != first
    torch.manual_seed(3)
    assert make(*arguments, Options(dropout=0.5)).seed == first


def test_no_random_number_is_drawn_without_dropout() -> None:
    state = torch.get_rng_state()
    make(Q, K, V)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "slopes", "table", "sink"])
def test_needs_grad(which: str) -> None:
    q, k, v = qkv(B)
    inputs: dict[str, Tensor] = {"q": q, "k": k, "v": v, "bias": torch.zeros(LQ, LK), "sink": torch.zeros(HQ)}
    inputs |= {"slopes": torch.ones(HQ), "table": torch.zeros(8, HQ)}
    options: dict[str, Any] = {"sink": inputs["sink"], "bias": inputs["bias"]}
    if which == "slopes":
        options["bias"] = scores.Alibi(inputs["slopes"])
    if which == "table":
        options["bias"] = scores.RelativeBias(inputs["table"])
    assert not make(q, k, v, Options(**options)).needs_grad
    inputs[which].requires_grad_()
    assert make(q, k, v, Options(**options)).needs_grad
    with torch.no_grad():
        assert not make(q, k, v, Options(**options)).needs_grad


def test_meta_tensors_are_checked_by_shape() -> None:
    q, k, v = (x.to("meta") for x in qkv(B))
    assert make(q, k, v, Options(mask=masks.Causal())).spec.out_shape == (B, HQ, LQ, DV)
    with pytest.raises(ValueError, match="k: expected last dim"):
        make(q, k[..., :-1], v)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize(
    "mask",
    [
        masks.Lengths([5, 7]),
        masks.longformer((2, 2), global_tokens=[0]),
        masks.Documents([0] * LK) & masks.Causal(),
    ],
    ids=repr,
)
def test_small_masks_follow_q(mask: masks.Mask, impl: str) -> None:
    mask = pickle.loads(pickle.dumps(mask))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (x.to("lazy") for x in qkv(B))
        problem = make(q, k, v, Options(mask=mask))
        assert problem.tensors
        assert all(x.device == q.device for x in problem.tensors)
        assert regard.attention(q, k, v, mask=mask, impl=impl).device == q.device


@pytest.mark.parametrize(
    "mask",
    [
        masks.Dense(torch.ones(LQ, LK).bool()),
        masks.Global(range(5000)),
        masks.Lengths(torch.empty(B, device="meta").long()),
    ],
    ids=repr,
)
def test_other_masks_must_be_on_the_device_of_q(mask: masks.Mask) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (x.to("lazy") for x in qkv(B))
        with pytest.raises(ValueError, match=r"mask: expected tensors on q's device, as from mask.to\('lazy"):
            make(q, k, v, Options(mask=mask))


# Three dims


@pytest.mark.parametrize("n", [1, B, HQ])
@pytest.mark.parametrize("batch", [(B,), (1,), (3, B)], ids=str)
def test_three_dims_need_three_dims_of_q(n: int, batch: tuple[int, ...]) -> None:
    keep, values = torch.ones(n, LQ, LK, dtype=torch.bool), torch.zeros(n, LQ, LK)
    forms = [
        ("mask", {"mask": keep}),
        ("mask", {"mask": masks.Dense(keep)}),
        ("mask", {"mask": ~masks.Dense(keep) | masks.Causal()}),
        ("bias", {"bias": values}),
    ]
    q, k, v = qkv(*batch)
    functions = (
        regard.attention,
        regard.weights,
        regard.plan,
        lambda *qkv, **options: regard.evidence(*qkv, regard.Entropy(), **options),
    )
    # A mask (Lq, Lk) of the same values must not leave a checked call behind that the 3-D mask fits.
    regard.attention(q, k, v, mask=keep[0])
    for (name, options), function in itertools.product(forms, functions):
        message = rf"{name}: .* got {re.escape(str(tuple(keep.shape)))}.* {name}\[:, None\] .* {name}\[None\]"
        with pytest.raises(ValueError, match=message):
            function(q, k, v, **options)


def test_three_dims_and_their_explicit_forms() -> None:
    H = B  # the sizes with which a mask for samples would pass for a mask for heads
    q, k, v = (torch.randn(B, H, 4, 8) for _ in range(3))
    keep, bias = torch.rand(B, 4, 4) > 0.3, torch.randn(B, 4, 4)
    by_sample = regard.attention(q, k, v, mask=keep[:, None], bias=bias[:, None])
    by_head = regard.attention(q, k, v, mask=keep[None], bias=bias[None])
    for b in range(B):
        expected = regard.attention(q[b], k[b], v[b], mask=keep[b], bias=bias[b])
        torch.testing.assert_close(by_sample[b], expected)
        torch.testing.assert_close(by_head[b], regard.attention(q[b], k[b], v[b], mask=keep, bias=bias))


# Messages

Q, K, V = torch.zeros(B, HQ, LQ, D), torch.zeros(B, HKV, LK, D), torch.zeros(B, HKV, LK, DV)
SHAPES = r"\(q \(2, 6, 5, 11\), k \(.*\), v \(.*\)\)"

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [[1.0]]}, TypeError, "q: expected a torch.Tensor, got list"),
    ({"k": None}, TypeError, "k: expected a torch.Tensor, got NoneType"),
    ({"v": V.numpy()}, TypeError, "v: expected a torch.Tensor, got ndarray"),
    ({"q": Q.long()}, TypeError, "q: expected dtype float64, float32, bfloat16 or float16, got torch.int64"),
    ({"q": Q.to(torch.complex64)}, TypeError, "q: expected dtype .* got torch.complex64"),
    ({"q": Q.to_sparse()}, TypeError, "q: expected a dense"),
    ({"k": K.double()}, TypeError, "k: expected q's dtype torch.float32, got torch.float64 " + SHAPES),
    ({"v": V.bfloat16()}, TypeError, "v: expected q's dtype torch.float32, got torch.bfloat16 " + SHAPES),
    ({"v": V.to("meta")}, ValueError, "v: expected q's device cpu, got meta"),
    ({"q": torch.zeros(5)}, ValueError, r"q: expected \(L, D\), .* got \(5,\)"),
    ({"k": K[0]}, ValueError, "k: expected 4 dims as in q, got 3 " + SHAPES),
    ({"v": V[None]}, ValueError, "v: expected 4 dims as in q, got 5 " + SHAPES),
    ({"k": K[..., :-1]}, ValueError, "k: expected last dim D = 11 as in q, got 10 " + SHAPES),
    ({"v": V[:, :, 1:]}, ValueError, "v: expected Lk = 7 rows as in k, got 6 " + SHAPES),
    ({"v": V[:, 1:]}, ValueError, "v: expected Hkv = 3 heads as in k, got 2 " + SHAPES),
    (
        {"k": torch.zeros(B, 4, LK, D), "v": torch.zeros(B, 4, LK, DV)},
        ValueError,
        r"k: .* divides Hq = 6, got 4 \(.*\)$",
    ),
    (
        {"q": Q.transpose(1, 2), "k": K.transpose(1, 2), "v": V.transpose(1, 2)},
        ValueError,
        r"k: .* divides Hq = 5, got 7 \(.*\); is this \(B, L, H, D\)\? transpose\(1, 2\)$",
    ),
    (
        {"q": Q[0].transpose(0, 1), "k": K[0].transpose(0, 1), "v": V[0].transpose(0, 1)},
        ValueError,
        r"k: .* divides Hq = 5, got 7 \(.*\); is this \(L, H, D\)\? transpose\(0, 1\)$",
    ),
    ({"k": K[:, :0], "v": V[:, :0]}, ValueError, "k: .* divides Hq = 6, got 0"),
    ({"k": torch.zeros(3, HKV, LK, D)}, ValueError, "batch dims that are equal or 1, got 2, 3 and 2"),
    ({"mask": torch.zeros(LQ, LK)}, TypeError, "mask: .*bias=.*got float32 tensor"),
    ({"mask": torch.zeros(LQ, LK).int()}, TypeError, r"mask: .*mask\.bool\(\).*got int32 tensor"),
    ({"mask": "causal"}, TypeError, "mask: expected a Mask or a bool tensor .* got str 'causal'"),
    (
        {"mask": torch.ones(LQ, LK + 1, dtype=torch.bool)},
        ValueError,
        r"^mask: expected a shape .*got \(5, 8\)",
    ),
    ({"mask": masks.Causal}, TypeError, r"mask: .*got the class Causal; call it: Causal\(\)"),
    ({"mask": masks.Window}, TypeError, r"mask: .*got the class Window; call it: Window\(\.\.\.\)"),
    ({"mask": masks.Lengths(torch.tensor([1, 2, 3]))}, ValueError, "Lengths"),
    ({"mask": masks.Lengths(torch.tensor([1, LK + 1]))}, ValueError, "expected lengths up to Lk = 7"),
    (
        {"mask": torch.ones(B, LK, dtype=torch.bool)},
        ValueError,
        r"mask: .* got \(2, 7\); write masks\.padding\(mask\) if a row says which keys of a sample are real$",
    ),
    ({"offset": True}, TypeError, "offset: expected an int"),
    ({"offset": Q[0, 0, 0].long().numpy()}, TypeError, "offset: expected an int, .* got ndarray"),
    ({"offset": 1.5}, TypeError, "offset: expected an int, .* got float 1.5"),
    ({"offset": torch.zeros(B)}, TypeError, "offset: .* got float32 tensor"),
    ({"offset": torch.zeros(B, dtype=torch.bool)}, TypeError, "offset: .* got bool tensor"),
    (
        {"offset": torch.zeros(3, dtype=torch.int64)},
        ValueError,
        r"offset: expected shape \(2,\), got \(3,\) " + SHAPES,
    ),
    ({"offset": 2**60}, ValueError, "offset: expected a position"),
    ({"offset": torch.tensor([0, -(2**60)])}, ValueError, "offset: expected positions"),
    ({"bias": 1.0}, TypeError, "bias: expected a float tensor"),
    ({"bias": torch.zeros(LQ, LK).bool()}, TypeError, "bias: .*mask="),
    (
        {"bias": torch.zeros(LQ, LK).double()},
        TypeError,
        "bias: expected dtype torch.float32, got torch.float64 .*q ",
    ),
    ({"bias": torch.zeros(LQ + 1, LK)}, ValueError, r"bias: .* = \(2, 6, 5, 7\), got \(6, 7\) " + SHAPES),
    ({"bias": torch.zeros(1, 1, 1, LQ, LK)}, ValueError, "bias: expected a shape broadcastable"),
    ({"bias": scores.Alibi(torch.ones(4))}, ValueError, "bias: expected a Alibi for Hq = 6 heads, got 4"),
    ({"bias": scores.RelativeBias(torch.ones(8, 4))}, ValueError, "bias: expected a RelativeBias for Hq = 6"),
    ({"scale": "big"}, TypeError, "scale: expected a number, got str"),
    ({"scale": torch.tensor(1.0)}, TypeError, "scale: expected a number, got float32 tensor"),
    ({"scale": float("nan")}, ValueError, "scale: expected a finite number, got nan"),
    ({"scale": float("inf")}, ValueError, "scale: expected a finite number, got inf"),
    ({"softcap": 0}, ValueError, "softcap: expected a finite number above 0, got 0.0"),
    ({"softcap": -2.0}, ValueError, "softcap: expected a finite number above 0, got -2.0"),
    ({"softcap": True}, TypeError, "softcap: expected a number, got bool"),
    ({"sink": 0.0}, TypeError, r"sink: expected a tensor of shape \(Hq,\), got float"),
    ({"sink": [0.0] * HQ}, TypeError, "sink: expected a tensor"),
    ({"sink": torch.zeros(HKV)}, ValueError, r"sink: expected shape \(Hq,\) = \(6,\), got \(3,\) " + SHAPES),
    ({"sink": torch.zeros(HQ).half()}, TypeError, "sink: expected dtype torch.float32"),
    ({"dropout": 1.5}, ValueError, "dropout: expected a probability from 0 to 1, got 1.5"),
    ({"dropout": -0.1}, ValueError, "dropout: expected a probability from 0 to 1"),
    ({"dropout": float("nan")}, ValueError, "dropout: expected a probability from 0 to 1"),
    ({"dropout": None}, TypeError, "dropout: expected a number, got NoneType"),
    ({"dropout": 0.5, "seed": 1.5}, TypeError, "seed: expected an int"),
    ({"dropout": 0.5, "seed": torch.zeros(2).long()}, TypeError, "seed: expected an int"),
    ({"dropout": 0.5, "seed": 2**64}, ValueError, "seed: expected an integer of 64 bits"),
    ({"seed": "x"}, TypeError, "seed: expected an int"),
    (
        {"dropout": 0.5, "seed": torch.zeros((), dtype=torch.int64, device="meta")},
        ValueError,
        "seed: expected a tensor with a value, got one on the device meta",
    ),
    ({"return_lse": 1}, TypeError, "return_lse: expected a bool, got int 1"),
    ({"impl": "fast"}, ValueError, "impl: expected one of auto, native, torch, reference, got 'fast'"),
    ({"impl": ["torch"]}, TypeError, "impl: expected one of"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_messages(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V} | change
    with pytest.raises(error, match=message):
        regard.attention(**arguments)


def test_messages_say_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"; write k\.to\(q\.dtype\)$"):
        regard.attention(Q, K.double(), V)
    assert regard.attention(Q, K.double().to(Q.dtype), V).shape == (B, HQ, LQ, DV)
    with pytest.raises(
        TypeError, match=r"ndarray of float32 and shape \(2, 3, 7, 13\); write torch\.from_numpy"
    ):
        regard.attention(Q, K, V.numpy())
    ones = torch.ones(LQ, LK)
    with pytest.raises(TypeError, match=r"mask: .* \(write mask\.bool\(\) if 1 = may attend, or bias= if"):
        regard.attention(Q, K, V, mask=ones)


@pytest.mark.parametrize("fourth", [masks.Causal(), torch.zeros(LQ, LK), None])
def test_options_by_position_say_what_to_write(fourth: Any) -> None:
    message = (
        "attention: expected q, k and v by position, got also .*; write mask= .*, bias= for a float tensor"
    )
    with pytest.raises(TypeError, match=message):
        regard.attention(Q, K, V, fourth)  # type: ignore[call-overload]
    assert "extra" not in inspect.signature(regard.attention).parameters


def test_random_mistakes_raise_only_value_or_type_errors() -> None:
    chance = random.Random(20)
    for _ in range(500):
        arguments: dict[str, Any] = {"q": Q, "k": K, "v": V}
        for change, _, _ in chance.sample(WRONG, chance.choice([1, 1, 2, 3])):
            arguments |= change
        with pytest.raises((ValueError, TypeError)) as caught:
            regard.attention(**arguments)
        assert str(caught.value)
