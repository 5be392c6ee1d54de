"""Guarantees of the native kernels: masked rows, NaN, layouts, equal bits, dropout."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks as M
from regard._backends.native import core
from regard._call.dropout import keep_mask
from regard.scores import Alibi
from support import HAVE_CORE, assert_close, rel_l2, repeats
from support.contract import KINDS, NAN, broken_values, masks_over, rows_without_keys, same_bits
from support.forward import DTYPES, INF, Call, Sampler, faults, multiplies_pairs, rounded_weights, sample

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


def native(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return regard.attention(q, k, v, impl="native", return_lse=True, **options)


def qkv(
    Lq: int, Lk: int, D: int = 8, Dv: int = 5, H: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shapes = ((2, H, Lq, D), (2, H, Lk, D), (2, H, Lk, Dv))
    return [torch.randn(shape).to(dtype) for shape in shapes]


# Fully masked rows


EMPTY_ROWS = [
    slice(0, 1),
    slice(0, 16),
    slice(0, 17),
    slice(7, 9),
    slice(16, 32),
    slice(30, 35),
    slice(34, 35),
    slice(0, 35),
]


@pytest.mark.parametrize("kind", ["bool", "bias", "row bias", "documents", "blocks"])
@pytest.mark.parametrize("sinks", [False, True])
def test_fully_masked_rows(isa: str, kind: str, sinks: bool, poison: None) -> None:
    sink = torch.tensor([0.3, -2.0])
    for dtype in DTYPES:
        for empty in EMPTY_ROWS:
            options = rows_without_keys(kind, 35, 101, empty) | ({"sink": sink} if sinks else {})
            q, k, v = qkv(35, 101, dtype=dtype)
            out, lse = native(q, k, v, **options)
            check_empty_rows(out[:, :, empty], lse[:, :, empty], sink if sinks else None)
            assert not faults(Call(q, k, v, options, isa))


def check_empty_rows(out: Tensor, lse: Tensor, sink: Tensor | None) -> None:
    assert torch.equal(out, torch.zeros_like(out))
    want = torch.full_like(lse, -INF) if sink is None else sink.to(lse.dtype)[:, None].expand_as(lse)
    assert torch.equal(lse, want)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("mask", "offset"),
    [
        (M.Window(3, 3), -8),
        (M.Window(3, 3), 60),
        (M.Causal(), -9),
        (M.Lengths([0, 4]), 0),
        (M.Prefix(0), 0),
        (M.Dilated(3) & M.Window(2, 0), -20),
        (~M.Window(None, None), 0),
    ],
)
def test_structured_masks_with_fully_masked_rows(
    isa: str, mask: M.Mask, offset: int, sinks: bool, poison: None
) -> None:
    q, k, v = qkv(35, 40)
    options: dict[str, Any] = {"mask": mask, "offset": offset} | ({"sink": torch.randn(2)} if sinks else {})
    out, lse = native(q, k, v, **options)
    fully_masked = ~mask.to_dense(35, 40, offset).expand(2, 2, 35, 40).any(-1)
    assert fully_masked.any()
    want = options["sink"].view(1, 2, 1).expand(2, 2, 35) if sinks else torch.full((2, 2, 35), -INF)
    assert torch.equal(lse[fully_masked], want[fully_masked])
    assert torch.equal(out[fully_masked], torch.zeros_like(out[fully_masked]))
    assert not faults(Call(q, k, v, options, isa))


@pytest.mark.parametrize("sinks", [False, True])
def test_no_keys(isa: str, sinks: bool, poison: None) -> None:
    for dtype in DTYPES:
        q, k, v = qkv(19, 0, dtype=dtype)
        sink = torch.tensor([1.7, -1.3]) if sinks else None
        out, lse = native(q, k, v, sink=sink)
        check_empty_rows(out, lse, sink)


def test_sink_of_minus_infinity_is_no_sink(isa: str) -> None:
    q, k, v = qkv(19, 33)
    for options in ({}, {"mask": M.Causal(), "offset": -3}):
        assert same_bits(native(q, k, v, sink=torch.full((2,), -INF), **options), native(q, k, v, **options))


@pytest.mark.parametrize("shape", [(35, 101), (1, 101), (35, 1), (1, 1)])
def test_the_lowest_bias_gives_the_mean(isa: str, shape: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        q, k, v = qkv(35, 101, dtype=dtype)
        bias = torch.full(shape, torch.finfo(dtype).min, dtype=dtype)
        out = native(q, k, v, bias=bias)[0]
        mean = v.double().mean(-2, keepdim=True).expand_as(out)
        assert rel_l2(out, mean) < 1e-6 + 1.01 * rel_l2(mean.to(dtype), mean)
        mixed = torch.zeros(101, dtype=dtype).masked_fill(torch.arange(101) >= 9, torch.finfo(dtype).min)
        assert same_bits(
            native(q, k, v, bias=mixed)[:1], native(q, k, v, bias=mixed.masked_fill(mixed < 0, -INF))[:1]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lse_of_the_lowest_bias(isa: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(5, 7, dtype=dtype)
    lowest = torch.finfo(dtype).min
    lse = native(q, k, v, bias=torch.full((5, 7), lowest, dtype=dtype))[1]
    assert_close(lse / lowest, torch.ones_like(lse))


def test_large_finite_bias_gives_finite_results(isa: str) -> None:
    q, k, v = qkv(5, 7)
    for bias in (torch.full((7,), 3e38), torch.full((7,), -3e38), Alibi(torch.tensor([8e36, 1e36]))):
        out = native(q, k, v, bias=bias, offset=20)[0]
        want = regard.attention(q, k, v, bias=bias, offset=20, impl="reference")
        assert_close(out, want)


# NaN and infinity


def visible(options: dict[str, Any], Lq: int, Lk: int) -> Tensor:
    """Returns which keys each query attends to, (2, 2, Lq, Lk)."""
    if "bias" in options:
        return (options["bias"] != -INF).expand(2, 2, Lq, Lk)
    mask = options["mask"]
    dense = mask if isinstance(mask, Tensor) else mask.to_dense(Lq, Lk)
    return dense.expand(2, 2, Lq, Lk) if dense.ndim < 4 else dense.expand(2, 2, -1, -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_only_attending_rows(isa: str, kind: str, dtype: torch.dtype, poison: None) -> None:
    """Rows that attend to a non-finite key or value are non-finite. Other rows are accurate."""
    options = masks_over(40, 101)[kind]
    attends = visible(options, 40, 101)
    for broken in broken_values(dtype):
        for j in (0, 50, 100):
            q, k, v = qkv(40, 101, dtype=dtype)
            v[:, :, j] = broken
            if broken.isnan():  # not inf: an infinite key may have a score of -inf, hence no weight
                k[:, :, j, 3] = broken
            out, lse = native(q, k, v, **options)
            touched = attends[..., j]
            assert out[~touched].isfinite().all()
            assert not out[touched].isfinite().any()
            check_against_clean(out, lse, q, k, v, options, j, ~touched)


def check_against_clean(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], j: int, rows: Tensor
) -> None:
    """Checks that `rows`, which do not attend to key j, are the same as with zeros in key j."""
    k, v = k.clone(), v.clone()
    k[:, :, j], v[:, :, j] = 0, 0
    call = Call(q, k, v, options, core.info()["isa"])
    want, want_lse = call.expected()
    dtype = out.dtype
    limit = 1.01 * rel_l2(want[rows].to(dtype), want[rows])
    limit += rounded_weights(call, want, rows) if multiplies_pairs(call) else 0.0
    assert rel_l2(out[rows], want[rows]) <= (1e-12 if dtype is torch.float64 else 1e-6) + limit
    finite = want_lse[rows] != -INF
    assert_close(lse[rows][finite], want_lse[rows][finite], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_every_masked_key(isa: str, dtype: torch.dtype) -> None:
    """Non-finite padding, as in unused cache slots, changes no bit."""
    for broken in broken_values(dtype):
        q, k, v = qkv(40, 101, dtype=dtype)
        clean = native(q, k[:, :, :70], v[:, :, :70])
        k[:, :, 70:], v[:, :, 70:] = broken, broken
        assert same_bits(native(q, k, v, mask=M.Lengths([70, 70])), clean)
        assert same_bits(native(q, k, v, mask=M.Prefix(70)), clean)


@pytest.mark.parametrize("Lq", [2, 5, 13, 17, 23, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_the_last_key_with_a_sink(isa: str, dtype: torch.dtype, Lq: int) -> None:
    """Only the last query attends to the key. The other rows are those of the reference."""
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for broken in broken_values(dtype):
        for which in (1, 2):
            inputs = qkv(Lq, 101, H=2, dtype=dtype)
            inputs[0] = torch.cat((inputs[0], -inputs[0]), 1)  # two query heads for each key head
            sink = torch.tensor([0.5, -1.0, 3.0, 40.0]).to(torch.promote_types(dtype, torch.float32))
            want = regard.attention(*inputs, mask=M.Causal(), sink=sink, impl="reference", return_lse=True)
            inputs[which][:, :, -1] = broken
            got = native(*inputs, mask=M.Causal(), sink=sink)
            for x, expected in zip(got, want, strict=True):
                assert_close(x[:, :, :-1], expected[:, :, :-1].to(x.dtype), rtol=tolerance, atol=tolerance)
            if broken.isnan():
                assert got[0][:, :, -1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_one_query_row(isa: str, dtype: torch.dtype) -> None:
    for broken in broken_values(dtype):
        q, k, v = qkv(40, 101, dtype=dtype)
        clean = native(q, k, v)
        q[1, 0, 17, 2] = broken
        out, lse = native(q, k, v)
        assert out[1, 0, 17].isnan().all()
        assert lse[1, 0, 17].isnan()
        for x, want in ((out, clean[0]), (lse, clean[1])):
            x[1, 0, 17] = want[1, 0, 17]
        assert same_bits((out, lse), clean)


def test_nan_query_in_a_fully_masked_row(isa: str) -> None:
    q, k, v = qkv(40, 101)
    q[:, :, 5] = NAN
    keep = torch.ones(40, 101, dtype=torch.bool)
    keep[5] = False
    for options in ({"mask": keep}, {"bias": torch.zeros(40, 101).masked_fill(~keep, -INF)}):
        out, lse = native(q, k, v, **options)
        assert torch.equal(out[:, :, 5], torch.zeros(2, 2, 5))
        assert (lse[:, :, 5] == -INF).all()
        assert out.isfinite().all()


@pytest.mark.parametrize("first", [True, False])
def test_attended_nan_propagates_at_any_weight(isa: str, first: bool) -> None:
    """A non-finite value reaches the row even if its weight underflows to 0, in any key order."""
    q, k, v = torch.full((1, 1, 4), 20.0), torch.zeros(1, 2, 4), torch.ones(1, 2, 3)
    k[0, int(first)] = 200.0
    for broken in (NAN, INF):
        v[0, int(not first), 1] = broken
        out = native(q, k, v)[0]
        assert torch.equal(out.isnan(), torch.tensor([[[False, True, False]]])), out


def test_nan_bias_or_sink_propagates(isa: str) -> None:
    q, k, v = qkv(20, 33)
    bias = torch.zeros(20, 33)
    bias[3, 4] = NAN
    out = native(q, k, v, bias=bias)[0]
    assert torch.equal(out.isnan().any(-1), torch.arange(20).eq(3).expand(2, 2, 20))
    out = native(q, k, v, sink=torch.tensor([0.0, NAN]))[0]
    assert out[:, 1].isnan().all()
    assert out[:, 0].isfinite().all()


@pytest.mark.parametrize("size", [1e5, 1e10, 1e15, 1e19])
def test_scores_beyond_float32(isa: str, size: float) -> None:
    """q.k reaches 1e38 * D. Results are finite wherever float64 results are finite."""
    q, k, v = qkv(35, 101)
    for options in (
        {},
        {"mask": M.Causal()},
        {"softcap": 30.0},
        {"bias": torch.randn(35, 101)},
        {"scale": 1.0},
    ):
        call = Call(q * size, k * size, v, options, isa)
        out, lse = call.run()
        want, want_lse = call.expected()
        assert out.isfinite().all()
        assert rel_l2(out, want) < 1e-5
        assert torch.equal(lse.isfinite(), want_lse.float().isfinite())


def test_values_near_the_largest_float(isa: str) -> None:
    q, k, _ = qkv(20, 33)
    v = torch.full((2, 2, 33, 5), 3.2e38) * torch.randn(2, 2, 33, 5).sign()
    assert not faults(Call(q, k, v, {}, isa))


def test_infinite_scores(isa: str) -> None:
    """A score of +inf gives NaN in its row, as in the formula. A score of -inf gives weight 0."""
    q, k, v = torch.ones(1, 3, 2), torch.zeros(1, 5, 2), torch.randn(1, 5, 3)
    k[0, 2, 0] = INF
    assert native(q, k, v)[0].isnan().all()
    k[0, 2, 0] = -INF
    finite_keys = [0, 1, 3, 4]
    assert_close(native(q, k, v)[0], native(q, k[:, finite_keys], v[:, finite_keys])[0])


# Layout


def random_view(x: Tensor, pick: random.Random) -> Tensor:
    """Returns x with random strides."""
    dims = list(range(x.ndim))
    kind = pick.choice(("transpose", "every second", "offset", "wide rows", "expand", "as it is"))
    if kind == "transpose":
        pick.shuffle(dims)
        back = [dims.index(d) for d in range(x.ndim)]
        return x.permute(dims).contiguous().permute(back)
    if kind == "every second":
        d = pick.choice(dims)
        spaced = x.repeat_interleave(2, d)
        return spaced.narrow(d, 0, spaced.shape[d] - 1)[(slice(None),) * d + (slice(None, None, 2),)]
    if kind == "expand":
        d = pick.choice(dims)
        return x.narrow(d, 0, 1).expand(x.shape)
    if kind == "as it is":
        return x
    shape = [n + pick.randint(0, 3) for n in x.shape]
    inside = tuple(slice(m - n, m) for n, m in zip(x.shape, shape, strict=True))
    buffer = x.new_full(shape, NAN if x.is_floating_point() else 1)
    buffer[inside] = x
    return buffer[inside]


def layout_faults(seed: int, work: float) -> str | None:
    """Checks that a sampled call gives the same bits with random strides.

    Returns a message or None.
    """
    call, pick = sample(seed, work), random.Random(seed)
    options = dict(call.options)
    q, k, v = (random_view(x, pick) for x in call[:3])
    for name in ("bias", "mask"):
        if isinstance(options.get(name), Tensor):
            options[name] = random_view(options[name], pick)
    contiguous_options = {n: x.contiguous() if isinstance(x, Tensor) else x for n, x in options.items()}
    strided = Call(q, k, v, options, call.isa)
    contiguous = Call(q.contiguous(), k.contiguous(), v.contiguous(), contiguous_options, call.isa)
    return None if same_bits(strided.run(), contiguous.run()) else f"seed {seed}: {strided}"


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_strides(first: int, poison: None) -> None:
    assert not [f for n in range(first, first + 50) if (f := layout_faults(n, 3e6))]


@pytest.mark.full
@pytest.mark.parametrize("first", range(400, 2400, 100))
def test_many_strides(first: int, poison: None) -> None:
    assert not [f for n in range(first, first + 100) if (f := layout_faults(n, 3e7))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_pointers(isa: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(35, 101, 24, 40, dtype=dtype)
    bias = torch.randn(35, 101).to(dtype)
    aligned = native(q, k, v, bias=bias)
    for shift in (1, 3, 7):
        views = [torch.cat([x.new_zeros(shift), x.flatten()])[shift:].view(x.shape) for x in (q, k, v, bias)]
        assert same_bits(native(*views[:3], bias=views[3]), aligned)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_and_memory_order_follow_q(isa: str, dtype: torch.dtype, poison: None) -> None:
    for dims in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2)):
        shape = (2, 3, 19, 8)
        back = [dims.index(d) for d in range(4)]
        q = torch.randn([shape[d] for d in dims]).to(dtype).permute(back)
        k, v = torch.randn(2, 3, 33, 8).to(dtype), torch.randn(2, 3, 33, 5).to(dtype)
        out, lse = native(q, k, v)
        assert out.dtype is dtype
        assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert out.permute(dims).is_contiguous()
        assert same_bits((out,), native(q.contiguous(), k, v)[:1])


def test_ranks(isa: str, poison: None) -> None:
    q, k, v = torch.randn(2, 3, 4, 9, 8), torch.randn(2, 3, 2, 11, 8), torch.randn(2, 3, 2, 11, 5)
    out, lse = native(q, k, v, mask=M.Causal())
    for a in range(2):
        for b in range(3):
            sample_result = native(q[a, b], k[a, b], v[a, b], mask=M.Causal())
            assert same_bits((out[a, b], lse[a, b]), sample_result)
    flat = native(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], mask=M.Causal())
    alone = native(q[0, 0, :1], k[0, 0, :1], v[0, 0, :1], mask=M.Causal())
    assert same_bits(flat, (alone[0][0], alone[1][0]))
    assert rel_l2(flat[0], out[0, 0, 0]) < 1e-6  # last bits depend on the rows per key head


# Equal bits


def calls_for_threads() -> list[Call]:
    isas = core.isas()
    sampled = [Sampler(seed, 4e7, isas).call() for seed in range(900, 944)]
    x = torch.randn(1, 2, 700, 32)
    masks = (
        None,
        M.Causal(),
        M.Window(100, 0),
        M.longformer((40, 40), [3]),
        M.Dilated(3) & M.Causal(),
        M.bigbird(16),
    )
    return sampled + [Call(x, x, x, {"mask": mask, "dropout": 0.1, "seed": 4}, isas[0]) for mask in masks]


@repeats(1, 20)
def test_any_number_of_threads(times: int) -> None:
    for call in calls_for_threads():
        results = []
        for threads in (1, 2, 3, 4, 8):
            torch.set_num_threads(threads)
            results += [call.run() for _ in range(times)]
        assert all(same_bits(results[0], other) for other in results[1:]), call


def test_repeated(isa: str) -> None:
    torch.set_num_threads(4)
    q, k, v = qkv(300, 300, 32, 32)
    first = native(q, k, v, mask=M.Causal())
    assert all(same_bits(native(q, k, v, mask=M.Causal()), first) for _ in range(20))


ALONE = {
    "none": None,
    "causal": M.Causal(),
    "window": M.Window(30, 0),
    "two-sided window": M.Window(50, 20),
    "longformer": M.longformer((20, 20), [0, 150]),
    "bigbird": M.bigbird(16),
    "dilated": M.Dilated(3) & M.Window(60, 0),
    "inverted": ~M.Window(40, 40),
    "packed": M.Documents(torch.arange(300) // 70) & M.Causal(),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_sample_alone_or_in_a_batch(isa: str, name: str) -> None:
    for dtype in DTYPES:
        shapes = ((40, 2, 300, 8), (40, 1, 300, 8), (40, 1, 300, 5))
        q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
        together = native(q, k, v, mask=ALONE[name], bias=Alibi.standard(2))
        for b in (0, 17, 39):
            alone = native(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask=ALONE[name], bias=Alibi.standard(2))
            assert same_bits((together[0][b : b + 1], together[1][b : b + 1]), alone)


@pytest.mark.parametrize("name", ALONE)
def test_a_head_alone_or_with_others(isa: str, name: str) -> None:
    q, k, v = torch.randn(1, 24, 300, 8), torch.randn(1, 24, 300, 8), torch.randn(1, 24, 300, 5)
    together = native(q, k, v, mask=ALONE[name])
    for h in (0, 23):
        alone = native(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], mask=ALONE[name])
        assert same_bits((together[0][:, h : h + 1], together[1][:, h : h + 1]), alone)


# Sizes


@pytest.mark.parametrize("empty", ["B", "Hq", "Lq", "Lk", "D", "Dv"])
def test_zero_sizes(isa: str, empty: str, poison: None) -> None:
    n = {"B": 2, "Hq": 2, "Lq": 5, "Lk": 7, "D": 8, "Dv": 4} | {empty: 0}
    q, k = torch.randn(n["B"], n["Hq"], n["Lq"], n["D"]), torch.randn(n["B"], n["Hq"], n["Lk"], n["D"])
    v = torch.randn(n["B"], n["Hq"], n["Lk"], n["Dv"])
    out, lse = native(q, k, v)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0 if empty == "D" else None)
    assert out.shape == want.shape
    assert lse.shape == want.shape[:-1]
    assert_close(out, want)
    for mask in (M.Causal(), M.Lengths(torch.zeros(n["B"], dtype=torch.int64))):
        masked = native(q, k, v, mask=mask)
        assert masked[0].shape == want.shape
        assert not masked[1].isnan().any()


def test_extreme_sizes(isa: str, poison: None) -> None:
    for shapes in (
        ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
        ((1, 1, 1, 1), (1, 1, 5000, 1), (1, 1, 5000, 1)),
        ((1, 1, 3000, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
        ((1, 300, 1, 2), (1, 1, 3, 2), (1, 1, 3, 2)),
        ((500, 1, 1, 2), (500, 1, 2, 2), (500, 1, 2, 1)),
        ((1, 1, 2, 5000), (1, 1, 2, 5000), (1, 1, 2, 3)),
        ((1, 1, 2, 3), (1, 1, 2, 3), (1, 1, 2, 5000)),
    ):
        q, k, v = (torch.randn(shape) for shape in shapes)
        assert not faults(Call(q, k, v, {}, isa)), shapes


# No side effects


def test_inputs_are_not_changed(isa: str) -> None:
    for seed in range(40):
        call = sample(seed, 3e6)._replace(isa=isa)
        tensors = [*call[:3], *(x for x in call.options.values() if isinstance(x, Tensor))]
        before = [x.clone() for x in tensors]
        out, lse = call.run()
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
        results = {x.untyped_storage().data_ptr() for x in (out, lse)}
        assert not results & {x.untyped_storage().data_ptr() for x in tensors}


def test_aliases(isa: str) -> None:
    x = torch.randn(2, 3, 40, 16)
    assert same_bits(native(x, x, x, mask=M.Causal()), native(x, x.clone(), x.clone(), mask=M.Causal()))
    latent = torch.randn(2, 1, 40, 24)
    q, v = torch.randn(2, 4, 40, 24), latent[..., :16]
    assert same_bits(native(q, latent, v), native(q, latent.clone(), v.contiguous()))
    qkv_of_one = torch.randn(2, 40, 3, 4, 8)
    q, k, v = (qkv_of_one[:, :, i].transpose(1, 2) for i in range(3))
    assert same_bits(native(q, k, v), native(q.contiguous(), k.contiguous(), v.contiguous()))


# Floating point environment


def subnormals_work() -> bool:
    half = torch.full((8,), torch.finfo(torch.float32).tiny) / 2
    return sys.float_info.min / 2 != 0.0 and bool((half != 0).all())


def test_subnormals_survive_a_call(isa: str) -> None:
    assert subnormals_work()
    q, k, v = qkv(300, 300, 32, 32)
    for threads in (1, 4):
        torch.set_num_threads(threads)
        native(q, k, v)
        assert subnormals_work()


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_inputs(isa: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny / 4
    q, k, v = qkv(35, 101, dtype=torch.float64)
    small = (v * tiny).to(dtype)
    assert small.ne(0).any()
    out, _ = native(q.to(dtype), k.to(dtype), small)
    call = Call(q.to(dtype), k.to(dtype), small, {}, isa)
    want, _ = call.expected()
    if multiplies_pairs(call):  # subnormal products count as 0
        assert (out.double() - want).abs().max() <= small.double().abs().max()
    else:
        assert rel_l2(out, want) < 1e-5 + 1.01 * rel_l2(want.to(dtype), want)
    assert not faults(Call((q * tiny).to(dtype), k.to(dtype), v.to(dtype), {}, isa))


# Dropout


def test_dropout_rate(isa: str) -> None:
    """With equal scores and values of 1, out is the kept fraction divided by 1 - p."""
    q, k, v = torch.zeros(2, 4, 400, 1), torch.zeros(2, 4, 400, 1), torch.ones(2, 4, 400, 1)
    for p in (0.1, 0.5, 0.9):
        share = native(q, k, v, dropout=p, seed=7)[0].mean().item() * (1 - p)
        assert abs(share - (1 - p)) < 0.002


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_pattern_matches_the_reference(isa: str, dtype: torch.dtype) -> None:
    """With unit vectors as values, out shows exactly which weights were kept."""
    for seed in (0, 1, -5, 2**64 - 1):
        for p in (0.1, 0.5, 1e-4, 0.9999):
            q, k = torch.zeros(2, 2, 37, 1, dtype=dtype), torch.zeros(2, 2, 101, 1, dtype=dtype)
            v = torch.eye(101, dtype=dtype).expand(2, 2, 101, 101)
            out = native(q, k, v, dropout=p, seed=seed)[0]
            assert torch.equal(out != 0, keep_mask(seed, p, 2, 2, 37, 101, q.device))


def test_dropout_pattern_ignores_masks_and_tiles(isa: str) -> None:
    q, k = torch.zeros(1, 4, 90, 1), torch.zeros(1, 2, 250, 1)
    v = torch.eye(250).expand(1, 2, 250, 250)
    pattern = keep_mask(9, 0.5, 1, 4, 90, 250, q.device)
    for mask in (M.Causal(), M.Dilated(3), M.Window(20, 20), M.Lengths([77]), M.bigbird(16)):
        out = native(q, k, v, mask=mask, dropout=0.5, seed=9)[0]
        assert torch.equal(out != 0, pattern & mask.to_dense(90, 250)), mask


def test_dropout_of_zero_and_one(isa: str) -> None:
    q, k, v = qkv(35, 101)
    without_dropout = native(q, k, v, mask=M.Causal())
    assert same_bits(native(q, k, v, mask=M.Causal(), dropout=0.0, seed=3), without_dropout)
    out, lse = native(q, k, v, mask=M.Causal(), dropout=1.0, seed=3)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, without_dropout[1])


def test_dropout_seeds(isa: str) -> None:
    q, k, v = qkv(300, 300, 16, 16)
    first = native(q, k, v, dropout=0.3, seed=11)
    for threads in (1, 2, 8):
        torch.set_num_threads(threads)
        assert same_bits(native(q, k, v, dropout=0.3, seed=11), first)
    assert not torch.equal(native(q, k, v, dropout=0.3, seed=12)[0], first[0])
    assert torch.equal(first[1], native(q, k, v)[1])


def test_dropout_from_the_generator_of_pytorch(isa: str) -> None:
    q, k, v = qkv(35, 101)
    drawn: list[Tensor] = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn += [native(q, k, v, dropout=0.3)[0] for _ in range(2)]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


def test_average_over_seeds_is_the_result_without_dropout(isa: str) -> None:
    q, k, v = qkv(8, 16)
    mean = torch.stack([native(q, k, v, dropout=0.5, seed=n)[0] for n in range(2000)]).mean(0)
    without_dropout = native(q, k, v)[0]
    assert rel_l2(mean, without_dropout) < 0.1
