"""Tests of the native gradients: accuracy, NaN, layouts, equal bits, memory, signals."""

from __future__ import annotations

import threading
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard import masks as M
from regard._backends.native import core
from regard.scores import Alibi, RelativeBias
from support import HAVE_CORE, repeats
from support.backward import (
    COMPUTED,
    MEMORY_OPTIONS,
    Training,
    by_pairs,
    computed,
    describe,
    errors,
    failures,
    faults,
    gate,
    gradients,
    inputs,
    norm,
    pairs_of,
    sample,
    term_norms,
    training,
)
from support.contract import KINDS, broken_values, masks_over, rows_without_keys, same_bits
from support.forward import DTYPES, INF, Call, faults as forward_faults
from support.options import BIAS_SHAPES, NAMES, bias_of, make as call_of, options_of
from support.processes import FORK, far, python, script
from support.strategies import Case, mask_strategy

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

NAN = float("nan")


def check(call: Call, lse: bool = False) -> None:
    t = training(call, lse)
    messages = faults(t)
    assert not messages, f"{messages} in {describe(t)}"


def bits(t: Training, names: Any = None) -> tuple[Tensor, ...]:
    return tuple(t.run(names).values())


# Sampled cases: every remainder of query tiles and key blocks, every option


@pytest.mark.parametrize("first", range(0, 192, 32))
def test_grid(first: int, poison: None) -> None:
    report = failures(range(first, first + 32), 1e7)
    assert not report, report


@pytest.mark.full
@pytest.mark.parametrize("first", range(192, 1344, 48))
def test_large_grid(first: int, poison: None) -> None:
    report = failures(range(first, first + 48), 6e7)
    assert not report, report


QUERIES = [*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 127, 128, 129]
KEYS = [*range(1, 20), 47, 48, 95, 96, 97, 191, 192, 193]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_queries(isa: str, dtype: torch.dtype, poison: None) -> None:
    for Lq in QUERIES:
        check(call_of(isa, 1, 2, 1, Lq, 21, 9, 5, dtype=dtype, mask=M.Causal()), lse=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_keys(isa: str, dtype: torch.dtype, poison: None) -> None:
    for Lk in KEYS:
        check(call_of(isa, 1, 2, 2, 17, Lk, 8, 8, dtype=dtype))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_up_to_259(isa: str, dtype: torch.dtype, poison: None) -> None:
    for n in range(1, 260):
        check(call_of(isa, 1, 1, 1, n, 21, 9, 5, dtype=dtype, mask=M.Window(9, 3)))
        check(call_of(isa, 1, 1, 1, 17, n, 8, 8, dtype=dtype, bias=torch.randn(17, n)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(isa: str, dtype: torch.dtype, poison: None) -> None:
    for n in [*range(1, 18), 31, 33, 64, 72, 127, 128, 129, 257]:
        check(call_of(isa, 1, 1, 1, 5, 7, n, 3, dtype=dtype))
        check(call_of(isa, 1, 1, 1, 5, 7, 3, n, dtype=dtype))


# D -> values of Lk near those at which the number of chunks grows: every 512 keys for D = 64, every
# 170 keys for D = 192. The length of a chunk is a multiple of 96.
CHUNKS = {64: (511, 512, 513, 575, 577, 1023, 1025), 192: (95, 97, 170, 171, 191, 193, 289), 576: (97, 193)}


@pytest.mark.parametrize("D", CHUNKS)
def test_lengths_around_chunk_boundaries(isa: str, D: int, poison: None) -> None:
    for Lk in CHUNKS[D]:
        for mask in (None, M.Causal(), M.Window(100, 0)):
            check(call_of(isa, 1, 2, 1, 67, Lk, D, D, mask=mask), lse=True)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_chunks(isa: str, dtype: torch.dtype, poison: None) -> None:
    masks = (
        M.Causal(),
        M.Dilated(3),
        M.longformer((70, 70), [0, 500]),
        M.Documents(torch.arange(1100) // 130),
    )
    for mask in masks:
        for D, Dv in ((64, 64), (200, 160), (16, 300)):
            check(call_of(isa, 1, 2, 1, 1100, 1100, D, Dv, dtype=dtype, mask=mask), lse=True)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 12])
def test_groups_of_heads(isa: str, group: int, poison: None) -> None:
    for options in ({}, {"mask": M.Causal()}, {"bias": Alibi.standard(2 * group), "dropout": 0.3, "seed": 1}):
        check(call_of(isa, 2, 2 * group, 2, 19, 37, 16, 24, **options))


@pytest.mark.parametrize("shape", [*BIAS_SHAPES, (2, 4, 1, 1), (2, 1, 17, 1), (2, 1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_broadcasts(isa: str, dtype: torch.dtype, shape: tuple[int, ...], poison: None) -> None:
    for bias in (torch.randn(shape), torch.randn(shape).to(dtype)):
        check(call_of(isa, 2, 4, 2, 17, 9, 8, 8, dtype=dtype, bias=bias, mask=M.Causal(), offset=0))


@pytest.mark.parametrize("shape", [(), (250,), (70, 1), (1, 3, 1, 1), (2, 1, 1, 250), (2, 3, 70, 250)])
def test_bias_of_many_tiles_and_chunks(isa: str, shape: tuple[int, ...], poison: None) -> None:
    for mask in (None, M.Dilated(3) & M.Causal()):
        check(call_of(isa, 2, 3, 1, 70, 250, 192, 192, bias=torch.randn(shape), mask=mask))


def test_bias_of_one_row_or_key(isa: str, poison: None) -> None:
    """If Lq or Lk is 1, a bias dim of size 1 can be read as full-size or as broadcast."""
    for Lq, Lk in ((1, 1), (1, 9), (9, 1)):
        for shape in ((), (Lq, Lk), (2, 1, 1, 1), (1, 4, Lq, Lk), (2, 4, Lq, Lk)):
            check(call_of(isa, 2, 4, 2, Lq, Lk, 8, 8, bias=torch.randn(shape)))


@pytest.mark.parametrize("first", NAMES)
def test_pairs_of_options(isa: str, first: str, poison: None) -> None:
    options = options_of(4, 33, 101)
    for second in NAMES[NAMES.index(first) :]:
        check(call_of(isa, 2, 4, 2, 33, 101, 16, 8, **(options[first] | options[second])), lse=True)


def test_all_options_at_once(isa: str, poison: None) -> None:
    for dtype in DTYPES:
        options = {
            "mask": M.Causal() & M.Lengths([101, 40]),
            "bias": torch.randn(1, 4, 33, 101),
            "softcap": 3.0,
        }
        options |= {"sink": torch.randn(4), "dropout": 0.2, "seed": 3, "scale": 0.2}
        options |= {"offset": torch.tensor([60, 68])}
        check(call_of(isa, 2, 4, 2, 33, 101, 16, 8, dtype=dtype, **options), lse=True)


@given(
    case=mask_strategy(sizes=(1, 2, 5, 17, 33, 70)).filter(lambda case: len(case.batch) == 1),
    isa=st.sampled_from(core.isas() or ["none"]),
    dtype=st.sampled_from(DTYPES),
    widths=st.tuples(st.sampled_from((1, 3, 8, 11)), st.sampled_from((1, 4, 9))),
    bias=st.sampled_from(("none", "none", "tensor", "alibi", "relative")),
    softcap=st.sampled_from((None, None, 2.0)),
    sink=st.booleans(),
    dropout=st.sampled_from((0.0, 0.0, 0.3)),
    lse=st.booleans(),
)
def test_masks_and_options(
    case: Case, isa: str, dtype: torch.dtype, widths: tuple[int, int], **chosen: Any
) -> None:
    shapes = ((case.Lq, widths[0]), (case.Lk, widths[0]), (case.Lk, widths[1]))
    q, k, v = (torch.randn(*case.batch, case.heads, *shape, dtype=dtype) for shape in shapes)
    options = {"mask": case.mask, "offset": case.offset, "softcap": chosen["softcap"]}
    options |= {"dropout": chosen["dropout"], "seed": 5} | bias_of(chosen["bias"], case, dtype)
    if chosen["sink"]:
        options["sink"] = torch.randn(case.heads)
    check(Call(q, k, v, options, isa), chosen["lse"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_relative_table_of_16_bits(isa: str, dtype: torch.dtype) -> None:
    """Thousands of distances share a bucket, so their sum must not be accumulated in 16 bits."""
    bias = RelativeBias(torch.randn(8, 2).to(dtype), bidirectional=False, max_distance=1000)
    t = training(call_of(isa, 1, 2, 1, 3, 1100, 8, 5, dtype=dtype, bias=bias))
    assert not faults(t._replace(dout=torch.ones_like(t.dout), dlse=torch.ones(1, 2, 3)))


@pytest.mark.parametrize("dropout", [0.1, 0.9, 1.0])
def test_dropout(isa: str, dropout: float, poison: None) -> None:
    for dtype in DTYPES:
        check(call_of(isa, 2, 2, 1, 67, 101, 8, 5, dtype=dtype, dropout=dropout, seed=2**63 + 5), lse=True)


# Accuracy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 128])
def test_relative_error(isa: str, dtype: torch.dtype, D: int) -> None:
    """The relative L2 error for N(0, 1) inputs is within the gate.

    The sizes are large enough for the error to be an average.
    """
    for L, mask in ((128, None), (301, M.Causal())):
        t = training(call_of(isa, 1, 2, 1, L, L, D, D, dtype=dtype, mask=mask))
        got, want = t.run(), t.expected()
        errors_by_name = {name: norm(got[name].double() - g) / norm(g) for name, g in want.items()}
        assert max(errors_by_name.values()) <= gate(t.call), errors_by_name


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["alibi", "relative", "tensor bias", "softcap", "sink", "dropout", "window"])
def test_relative_error_with_options(isa: str, dtype: torch.dtype, name: str) -> None:
    t = training(call_of(isa, 2, 4, 2, 511, 511, 64, 64, dtype=dtype, **options_of(4, 511, 511)[name]))
    got, want = t.run(), t.expected()
    errors_by_name = {n: norm(got[n].double() - want[n]) / norm(want[n]) for n in "qkv"}
    assert max(errors_by_name.values()) <= gate(t.call), errors_by_name


def pytorch_errors(t: Training, want: dict[str, Tensor]) -> dict[str, float]:
    """Returns for each gradient the larger of the errors of PyTorch's unfused and fused kernels."""
    worst = dict.fromkeys("qkv", 0.0)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        leaves = [x.detach().clone().requires_grad_() for x in t.call[:3]]
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves)
        for name, x in zip("qkv", torch.autograd.grad(out, leaves, t.dout), strict=True):
            worst[name] = max(worst[name], norm(x.double() - want[name]))
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("factor", "heads", "Lq"), [(8, 128, 1), (8, 64, 3), (8, 16, 78), (64, 64, 67)])
def test_large_scores(isa: str, factor: int, heads: int, Lq: int, dtype: torch.dtype) -> None:
    """Rows are nearly one-hot, so the error of the scores dominates.

    The limit is twice PyTorch's error.
    """
    call = call_of(isa, 1, heads, heads, Lq, 128, 64, 64, dtype=dtype)
    t = training(call._replace(q=call.q * factor, k=call.k * factor))
    got, want, norms = t.run(), t.expected(), term_norms(t, pairs_of(t.call))
    for name, pytorch in pytorch_errors(t, want).items():
        error = norm(got[name].double() - want[name])
        assert error <= 2 * pytorch + COMPUTED[dtype] * norms[name], f"d{name}: {error}, PyTorch {pytorch}"


@pytest.mark.parametrize("size", [1e5, 1e10, 1e15, 1e19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_beyond_float32(isa: str, size: float, dtype: torch.dtype) -> None:
    """q.k reaches 1e38 * D, so weights are one-hot. Gradients must be finite and accurate."""
    for options in ({}, {"mask": M.Causal()}, {"bias": torch.randn(35, 101)}, {"scale": 1.0}):
        call = call_of(isa, 2, 2, 2, 35, 101, 8, 5, dtype=dtype, **options)
        t = training(call._replace(q=call.q * size, k=call.k * size))
        got, want, norms = t.run(), t.expected(), term_norms(t, pairs_of(t.call))
        for name, g in want.items():
            assert got[name].isfinite().all(), name
            rounding = 1.01 * norm(g.to(got[name].dtype).double() - g)
            assert norm(got[name].double() - g) <= 1e-5 * norms[name] + rounding, name


@pytest.mark.parametrize("size", [1e5, 1e10, 1e19])
def test_capped_scores_beyond_float32(isa: str, size: float) -> None:
    call = call_of(isa, 2, 2, 2, 35, 101, 8, 5, softcap=30.0)
    t = training(call._replace(q=call.q * size, k=call.k * size))
    got, want = t.run(), t.expected()
    assert norm(got["v"].double() - want["v"]) <= 1e-6 * norm(want["v"])
    for name in "qk":
        assert got[name].isfinite().all()


# LSE far from zero: lanes beyond the edge of a tile would overflow if the kernel did not mask them.


@pytest.mark.parametrize("lse", [-200.0, -89.0, 0.0, 89.0, 200.0])
@pytest.mark.parametrize("how", ["bias", "row bias", "alibi", "sink"])
def test_lse_far_from_zero(isa: str, lse: float, how: str, poison: None) -> None:
    for dtype in DTYPES:
        for Lq, Lk in ((1, 1), (17, 33), (67, 101)):
            options = {
                "bias": {"bias": torch.full((Lq, Lk), lse)},
                "row bias": {"bias": torch.full((Lk,), lse)},
                "alibi": {"bias": Alibi(torch.full((2,), -lse / (2000 + Lk))), "offset": 2000 + Lk // 2},
                "sink": {"sink": torch.full((2,), lse)},
            }[how]
            check(call_of(isa, 1, 2, 2, Lq, Lk, 8, 5, dtype=dtype, **options), lse=True)


@pytest.mark.parametrize("shape", [(35, 101), (1, 101), (35, 1), (1, 1)])
def test_the_lowest_bias_gives_the_mean(isa: str, shape: tuple[int, int], poison: None) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        bias = torch.full(shape, torch.finfo(dtype).min, dtype=dtype)
        t = training(call_of(isa, 2, 2, 2, 35, 101, 8, 5, dtype=dtype, bias=bias))
        assert not faults(t)
        mean = t.dout.double().sum(-2, keepdim=True).div(101).expand(t.call.v.shape)
        error = norm(t.run()["v"].double() - mean)
        assert error <= computed(t.call) * norm(mean) + 1.01 * norm(mean.to(dtype).double() - mean)


# Fully masked rows, keys masked for all queries


@pytest.mark.parametrize("kind", ["bool", "bias", "row bias", "documents", "blocks"])
@pytest.mark.parametrize("sinks", [False, True])
def test_fully_masked_rows(isa: str, kind: str, sinks: bool, poison: None) -> None:
    sink = {"sink": torch.tensor([0.3, -2.0])} if sinks else {}
    for dtype in DTYPES:
        for empty in (slice(0, 17), slice(30, 35), slice(0, 35)):
            options = rows_without_keys(kind, 35, 101, empty) | sink
            t = training(call_of(isa, 2, 2, 2, 35, 101, 8, 5, dtype=dtype, **options), lse=True)
            assert not faults(t)
            assert not t.run()["q"][:, :, empty].any()


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
        (M.Dilated(1000), 3),
        (M.Causal(), torch.tensor([-9, 200])),
    ],
)
def test_masks_with_fully_masked_rows(
    isa: str, mask: M.Mask, offset: int | Tensor, sinks: bool, poison: None
) -> None:
    options: dict[str, Any] = {"mask": mask, "offset": offset} | ({"sink": torch.randn(2)} if sinks else {})
    check(call_of(isa, 2, 2, 2, 35, 40, 8, 5, **options), lse=True)
    check(call_of(isa, 2, 2, 2, 35, 40, 8, 5, **options, bias=torch.randn(2, 1, 1, 40)))


# NaN and infinity. Unlike forward, backward does not recompute non-finite rows, so non-finite
# numbers in masked pairs change no bit.

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.3, "seed": 1},
    "softcap": {"softcap": 3.0},
    "sink": {"sink": torch.tensor([0.3, -2.0])},
    "bias": {"bias": torch.linspace(-1, 1, 101)},
    "alibi": {"bias": Alibi.standard(2)},
    "relative": {"bias": RelativeBias(torch.linspace(-1, 1, 16).view(8, 2))},
}


def holes(kind: str) -> dict[str, Any]:
    """Returns options with a mask of 40 rows and 101 keys.

    Rows 0, 7, 16 to 31 and 39 are fully masked. No row may attend to keys 0, 50 to 60 and 100.
    """
    rows, keys = torch.ones(40, dtype=torch.bool), torch.ones(101, dtype=torch.bool)
    rows[[0, 7, 39, *range(16, 32)]] = False
    keys[[0, 100, *range(50, 61)]] = False
    if kind == "documents":
        return {"mask": M.Documents(torch.where(rows, 1, 2), torch.where(keys, 1, 3))}
    if kind == "random":
        drawn = torch.rand(40, 101, generator=torch.Generator().manual_seed(3)) < 0.6
        return {"mask": M.Dense(rows[:, None] & keys & drawn)}
    if kind == "causal":
        return {"mask": M.Dense(rows[:, None] & keys) & M.Causal()}
    return {"mask": rows[:, None] & keys}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["documents", "random", "causal", "bool"])
@pytest.mark.parametrize("place", ["q", "k", "v", "dout", "dlse"])
def test_masked_nan_changes_no_bit(isa: str, option: str, kind: str, place: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        options = OPTIONS[option] | holes(kind)
        if "sink" in options and place == "dlse":
            continue  # with a sink, fully masked rows have a finite LSE
        clean = training(call_of(isa, 2, 2, 1, 40, 101, 8, 5, dtype=dtype, **options), lse=True)
        want = clean.run()
        for broken in broken_values(dtype)[::3]:
            t = Training(clean.call._replace(q=clean.call.q.clone()), clean.dout.clone(), clean.dlse.clone())
            tensors = {"q": t.call.q, "k": t.call.k, "v": t.call.v, "dout": t.dout, "dlse": t.dlse}
            if place in "kv":
                tensors[place] = tensors[place].clone()
                t = t._replace(call=t.call._replace(**{place: tensors[place]}))
                tensors[place][:, :, [0, 100, *range(50, 61)]] = broken
            else:
                tensors[place][:, :, [0, 7, 39, *range(16, 32)]] = broken.to(tensors[place].dtype)
            got = t.run()
            bad = [n for n in want if not same_bits((got[n],), (want[n],))]
            assert not bad, (place, broken, bad, {n: norm(got[n].double() - want[n].double()) for n in bad})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_padding_changes_no_bit(isa: str, kind: str, dtype: torch.dtype) -> None:
    """Non-finite queries and keys beyond the lengths, under any other mask, change no bit."""
    options = masks_over(40, 101)[kind]
    lengths = M.Documents(torch.arange(40) // 33, torch.arange(101) // 70 * 2)
    options |= {"mask": lengths if "bias" in options else lengths & as_mask(options["mask"])}
    clean = training(call_of(isa, 2, 2, 2, 40, 101, 8, 5, dtype=dtype, **options))
    want = bits(clean)
    for broken in broken_values(dtype):
        q, k, v = (x.clone() for x in clean.call[:3])
        dout = clean.dout.clone()
        q[:, :, 33:] = k[:, :, 70:] = v[:, :, 70:] = dout[:, :, 33:] = broken
        assert same_bits(bits(Training(clean.call._replace(q=q, k=k, v=v), dout)), want)


def as_mask(mask: M.Mask | Tensor) -> M.Mask:
    return M.Dense(mask) if isinstance(mask, Tensor) else mask


def check_nan_positions(t: Training) -> None:
    """Checks that NaN occurs exactly where `by_pairs` has NaN. Other values must be accurate."""
    got, want = t.run(), by_pairs(t)
    for name, g in want.items():
        finite = g.isfinite()
        assert torch.equal(got[name].isfinite(), finite), f"d{name}: {rows_that_differ(got[name], finite)}"
        error = norm(got[name].double()[finite] - g[finite])
        dtype = got[name].dtype
        rounding = norm(g[finite].to(dtype).double() - g[finite]) if dtype.itemsize == 2 else 0.0
        limit = {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, COMPUTED[dtype])
        assert error <= limit * norm(g[finite]) + rounding, f"d{name}: {error} of {norm(g[finite])}"


def rows_that_differ(x: Tensor, finite: Tensor) -> str:
    return f"rows {sorted(set((x.isfinite() != finite).nonzero()[:, 2].tolist()))}"


def with_nan(t: Training, place: str, rows: tuple[int, int, int]) -> Training:
    """Sets element 3 of one row to NaN, in three of the four heads (b, h); `rows` are the rows."""
    tensor = t.dout if place == "dout" else getattr(t.call, place)
    for (b, h), row in zip(((0, 0), (0, 1), (1, 0)), rows, strict=True):
        tensor[b, h, row, 3] = NAN
    return t


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["q", "k", "v", "dout"])
def test_nan_reaches_only_visible_pairs(isa: str, kind: str, place: str, poison: None) -> None:
    """A NaN in the first, a middle or the last row spreads only through visible pairs."""
    rows = (0, 50, 100) if place in "kv" else (0, 20, 39)
    for dtype in (torch.float32, torch.bfloat16):
        options = masks_over(40, 101)[kind] | ({"softcap": 3.0} if dtype is torch.float32 else {})
        check_nan_positions(
            with_nan(training(call_of(isa, 2, 2, 2, 40, 101, 8, 5, dtype=dtype, **options)), place, rows)
        )


@pytest.mark.parametrize("place", ["q", "k", "v", "dout"])
def test_nan_in_full_blocks(isa: str, place: str, poison: None) -> None:
    for options in ({}, {"softcap": 3.0}, {"mask": M.Causal()}, {"mask": M.Lengths([200, 120])}):
        t = training(call_of(isa, 2, 2, 2, 67, 200, 8, 5, **options))
        check_nan_positions(with_nan(t, place, (0, 50, 66)))


@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("dropout", [0.3, 0.9])
def test_rows_that_mask_a_nan_keep_their_dropout(isa: str, place: str, dropout: float) -> None:
    """Rows that may not attend to key 50 have the same dq with and without a NaN in key 50."""
    keep = torch.rand(40, 101) < 0.6
    call = call_of(isa, 1, 2, 2, 40, 101, 8, 5, mask=M.Dense(keep), dropout=dropout, seed=1)
    clean = training(call)
    broken = {place: getattr(call, place).clone()}
    broken[place][:, :, 50] = NAN
    got = Training(call._replace(**broken), clean.dout).run()["q"][:, :, ~keep[:, 50]]
    want = clean.run()["q"][:, :, ~keep[:, 50]]
    assert norm(got - want) <= 1e-6 * norm(want)


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("place", ["k", "v", "dout"])
def test_attended_nan_propagates_at_any_weight(isa: str, rows: int, place: str) -> None:
    """NaN in v or dout reaches the gradients even if the weight underflows to 0.

    An infinite key takes all weight of its row.
    """
    q, k, v = torch.full((1, 1, rows, 4), 20.0), torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 3)
    k[:, :, 1] = 200.0
    t = Training(Call(q, k, v, {}, isa), torch.ones(1, 1, rows, 3))
    {"k": k, "v": v, "dout": t.dout}[place][0, 0, 0, 1] = INF if place == "k" else NAN
    got, want = t.run(), by_pairs(t)
    for name, g in want.items():
        assert torch.equal(got[name].isnan(), g.isnan()), (name, rows_that_differ(got[name], g.isfinite()))


def test_nan_bias_or_sink_propagates(isa: str) -> None:
    bias = torch.zeros(20, 33)
    bias[3, 4] = NAN
    got = training(call_of(isa, 2, 2, 2, 20, 33, 8, 5, bias=bias)).run()
    rows = torch.arange(20).eq(3).expand(2, 2, 20)
    assert torch.equal(got["q"].isnan().any(-1), rows)
    assert torch.equal(got["bias"].isnan().any(-1), rows[0, 0])
    got = training(call_of(isa, 2, 2, 2, 20, 33, 8, 5, sink=torch.tensor([0.0, NAN]))).run()
    for name in "qkv":
        assert got[name][:, 1].isnan().all()
        assert got[name][:, 0].isfinite().all()
    assert got["sink"].isnan().tolist() == [False, True]


# Memory layout: strides, aliases, bounds


def in_larger_buffer(x: Tensor, by: float = NAN) -> Tensor:
    """Copies x into the inside of a larger buffer filled with `by`."""
    big = torch.full([n + 3 for n in x.shape], by, dtype=x.dtype)
    return big[tuple(slice(1, n + 1) for n in x.shape)].copy_(x)


LAYOUTS: dict[str, Any] = {
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dim outside": lambda x: x.movedim(3, 0).contiguous().movedim(0, 3),
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "every second number": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "NaN around": in_larger_buffer,
    "one element on": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_bits(isa: str, layout: str, poison: None) -> None:
    change = LAYOUTS[layout]
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({"mask": M.Causal()}, {"mask": M.Dilated(2), "softcap": 5.0}, {}):
            call = call_of(isa, 2, 4, 2, 67, 131, 24, 9, dtype=dtype, **options)
            t = training(call)
            want = bits(t)
            q, k, v = (change(x) for x in call[:3])
            assert same_bits(bits(t._replace(dout=change(t.dout))), want)
            for changed in ({"q": q}, {"k": k}, {"v": v}, {"q": q, "k": k, "v": v}):
                assert same_bits(bits(t._replace(call=call._replace(**changed))), want), list(changed)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_expanded_gradients_and_inputs(isa: str, dims: tuple[int, ...], poison: None) -> None:
    """Stride 0: in dout as from `out.sum().backward()`, in q, k and v as from broadcasting."""
    for dtype in DTYPES:
        call = call_of(isa, 2, 4, 2, 67, 131, 24, 9, dtype=dtype, mask=M.Causal())
        t = training(call)
        expanded = [expanded_from_first(x, dims) for x in (t.dout, *call[:3])]
        want = bits(
            Training(Call(*(x.contiguous() for x in expanded[1:]), call.options, isa), expanded[0].clone())
        )
        assert same_bits(
            bits(Training(call._replace(q=expanded[1], k=expanded[2], v=expanded[3]), expanded[0])), want
        )


def expanded_from_first(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Expands the first element of each dim in `dims` to the full size."""
    shape = x.shape
    for dim in dims:
        x = x.narrow(dim, 0, 1)
    return x.expand(shape)


def test_bias_layouts(isa: str, poison: None) -> None:
    bias = torch.randn(2, 4, 67, 131)
    call = call_of(isa, 2, 4, 2, 67, 131, 24, 9, bias=bias)
    t = training(call)
    want = bits(t)
    for layout, change in LAYOUTS.items():
        assert same_bits(bits(t._replace(call=call._replace(options={"bias": change(bias)}))), want), layout
    for dims in ((0,), (1,), (2,), (3,), (1, 2)):
        expanded = expanded_from_first(bias, dims)
        want = bits(t._replace(call=call._replace(options={"bias": expanded.clone()})))
        assert same_bits(bits(t._replace(call=call._replace(options={"bias": expanded}))), want), dims


def test_layouts_of_the_lse_gradient(isa: str) -> None:
    t = training(call_of(isa, 2, 4, 2, 67, 131, 24, 9, mask=M.Causal()), lse=True)
    assert t.dlse is not None
    assert same_bits(bits(t._replace(dlse=t.dlse.mT.contiguous().mT)), bits(t))
    expanded = t.dlse[:1, :1, :1].expand(t.dlse.shape)  # the gradient of lse.sum()
    assert same_bits(bits(t._replace(dlse=expanded)), bits(t._replace(dlse=expanded.contiguous())))
    zero_dout = torch.zeros(()).expand(t.dout.shape)
    assert not faults(t._replace(dout=zero_dout))


def test_v_may_be_a_view_of_k(isa: str) -> None:
    q, keys_and_values = torch.randn(1, 4, 33, 24), torch.randn(1, 1, 70, 24)
    before = keys_and_values.clone()
    t = training(Call(q, keys_and_values, keys_and_values[..., :16], {"mask": M.Causal()}, isa))
    copied = t._replace(call=t.call._replace(k=keys_and_values.clone(), v=keys_and_values[..., :16].clone()))
    assert same_bits(bits(t), bits(copied))
    assert torch.equal(keys_and_values, before)


@pytest.mark.parametrize("dim", range(4))
def test_strides_beyond_32_bits(isa: str, dim: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        call = call_of(isa, 2, 2, 2, 3, 3, 2, 2, dtype=dtype, mask=M.Causal())
        t = training(call)
        q, k, v = (far(x, dim) for x in call[:3])
        assert same_bits(bits(Training(call._replace(k=k, v=v), far(t.dout, dim))), bits(t))
        assert same_bits(bits(t._replace(call=call._replace(q=q)), "kv"), bits(t, "kv"))


def run_guarded(first: int, count: int) -> None:
    process = python("-c", f"from support import backward as b; b.check_all_guarded({first}, {count})")
    assert process.returncode == 0, f"after {process.stdout.splitlines()[-1:]}: {process.stderr[-3000:]}"


def test_no_access_out_of_bounds() -> None:
    run_guarded(0, 40)


@pytest.mark.full
@pytest.mark.parametrize("first", range(40, 840, 100))
def test_no_access_out_of_bounds_in_many_cases(first: int) -> None:
    run_guarded(first, 100)


def test_inputs_are_not_changed(isa: str) -> None:
    for index in range(12):
        t = sample(index, 1e6)
        tensors = [*inputs(t.call).values(), t.dout, *([t.dlse] if t.dlse is not None else [])]
        before = [x.clone() for x in tensors]
        t.run()
        assert same_bits(tuple(tensors), tuple(before))


# Equal bits


def one_head(isa: str, **options: Any) -> Training:
    """Returns a Training with one head and 11 chunks of keys: threads share the sums of dq."""
    return training(call_of(isa, 1, 1, 1, 700, 1000, 192, 192, **options), lse=True)


ONE_HEAD: list[dict[str, Any]] = [
    {},
    {"mask": M.Causal()},
    {"mask": M.Window(150, 30)},
    {"mask": M.Dilated(2)},
]


def single_head_and_sampled(isa: str) -> list[Training]:
    """Returns Trainings of single-head calls and of sampled calls."""
    cases = [sample(index, 1e7) for index in range(2000, 2012)]
    return [one_head(isa, **o) for o in ONE_HEAD] + [t._replace(call=t.call._replace(isa=isa)) for t in cases]


def test_any_number_of_threads(isa: str) -> None:
    for t in single_head_and_sampled(isa):
        torch.set_num_threads(1)
        want = bits(t)
        for count in (2, 3, 8):
            torch.set_num_threads(count)
            assert same_bits(bits(t), want), f"{count} threads: {describe(t)}"


@repeats(5, 100)
def test_repeated(isa: str, times: int) -> None:
    torch.set_num_threads(2)
    t = one_head(isa, mask=M.Causal(), bias=torch.randn(1000))
    want = bits(t)
    assert all(same_bits(bits(t), want) for _ in range(times))


def options_of_three_samples() -> list[dict[str, Any]]:
    """Returns options with tensors for three samples."""
    return [
        {},
        {"mask": M.Causal(), "offset": torch.tensor([0, 40, 150])},
        {"mask": M.Lengths([200, 0, 77])},
        {"mask": torch.rand(3, 1, 37, 200) < 0.5, "softcap": 3.0},
        {"bias": torch.randn(3, 2, 37, 200)},
        {"bias": torch.randn(3, 1, 1, 200), "sink": torch.randn(2)},
        {"mask": M.Dilated(3), "offset": torch.tensor([0, 1, 5])},
    ]


def of_sample(x: Any, b: int) -> Any:
    if isinstance(x, M.Lengths):
        return M.Lengths(x.n[b : b + 1])
    return x[b : b + 1] if isinstance(x, Tensor) and x.shape[0] == 3 else x


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_alone_or_in_a_batch(isa: str, dtype: torch.dtype) -> None:
    for options in options_of_three_samples():
        t = training(call_of(isa, 3, 2, 1, 37, 200, 192, 192, dtype=dtype, **options), lse=True)
        batched = t.run("qkv")
        for b in range(3):
            call = Call(
                *(x[b : b + 1] for x in t.call[:3]), {n: of_sample(x, b) for n, x in options.items()}, isa
            )
            alone = Training(call, t.dout[b : b + 1], t.dlse[b : b + 1]).run("qkv")
            assert not [n for n in alone if not torch.equal(alone[n], batched[n][b : b + 1])], list(options)


@repeats(2, 20)
def test_calls_from_many_threads(times: int) -> None:
    """8 Python threads with 2 PyTorch threads each give the bits of serial calls."""
    torch.set_num_threads(2)
    calls = single_head_and_sampled(core.info()["isa"])
    want = [tuple(gradients(t).values()) for t in calls]
    wrong: list[int] = []

    def work(start: int) -> None:
        order = [(start * 3 + n) % len(calls) for n in range(len(calls))] * times
        wrong.extend(n for n in order if not same_bits(tuple(gradients(calls[n]).values()), want[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORKED = FORK.replace(
    "def result():",
    """from support.backward import Call, gradients, training
    t = training(Call(q, k, v, {"mask": M.Causal()}, "any"))

    def result():
        return b"".join(x.numpy().tobytes() for x in gradients(t).values())

    def forward():""",
)


@repeats(10, 100)
def test_fork_after_threads(times: int) -> None:
    script(
        FORKED
        + f"""
    assert all(child_agrees() for _ in range({times}))
    assert result() == want
    """
    )


# Subsets of gradients


@pytest.mark.parametrize("index", range(3000, 3012))
def test_any_subset_of_gradients(index: int, poison: None) -> None:
    t = sample(index, 2e6)
    names = list(inputs(t.call))
    all_grads = t.run()
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            grads = t.run(chosen)
            assert list(grads) == list(chosen)
            assert not [n for n in grads if not torch.equal(grads[n], all_grads[n])], (chosen, describe(t))


def test_forward_with_gradients_required(isa: str) -> None:
    """Forward may use another kernel when backward follows. Its results must be as accurate."""
    for index in range(24):
        call = sample(index, 2e6).call._replace(isa=isa)
        differentiable = Call(call.q.detach().requires_grad_(), *call[1:])
        out, lse = differentiable.run()
        assert out.requires_grad
        assert lse.requires_grad
        messages = forward_faults(differentiable)
        assert not messages, (messages, call)


# Empty sizes


@pytest.mark.parametrize("name", ["B", "H", "Lq", "Lk", "D", "Dv"])
def test_zero_sizes(isa: str, name: str, poison: None) -> None:
    n = {"B": 2, "H": 4, "Lq": 19, "Lk": 33, "D": 8, "Dv": 5} | {name: 0}
    sizes = (n["B"], n["H"], n["H"] // 2, n["Lq"], n["Lk"], n["D"], n["Dv"])
    options: list[dict[str, Any]] = [{}, {"mask": M.Causal()}, {"dropout": 0.2, "seed": 1}, {"softcap": 2.0}]
    if n["H"]:
        options += [{"sink": torch.randn(n["H"])}, {"bias": Alibi.standard(n["H"])}]
        options += [{"bias": RelativeBias(torch.randn(8, n["H"]))}, {"bias": torch.randn(n["Lq"], n["Lk"])}]
        options += [{"bias": torch.randn(1, n["H"], 1, 1)}, {"bias": torch.randn(n["B"], 1, 1, n["Lk"])}]
    for dtype in DTYPES:
        for case_options in options:
            t = training(call_of(isa, *sizes, dtype=dtype, **case_options), lse=True)
            got, want = t.run(), t.expected()
            for key, x in inputs(t.call).items():
                assert got[key].shape == x.shape
                assert norm(got[key].double() - want[key]) <= 5e-3 * norm(want[key]), (key, case_options)


# Memory


def extra_memory(*names: str) -> dict[str, int]:
    """Returns the peak memory in bytes that each case adds."""
    code = f"from support import backward as b; b.print_extra_memory({names})"
    lines = script(code, MALLOC_MMAP_THRESHOLD_="65536").splitlines()
    return {name: int(size) for name, size in (line.rsplit(" ", 1) for line in lines)}


def check_memory(*names: str) -> None:
    memory = extra_memory("plain", *names)
    limit = 2 * memory.pop("plain")
    assert not {name: size for name, size in memory.items() if size > limit}, f"limit {limit}"


def test_memory_of_a_few_options() -> None:
    check_memory("window+row_bias+bfloat16", "window+relative+dropout+sink")


@pytest.mark.full
@pytest.mark.parametrize("part", range(2))
def test_memory_of_every_option(part: int) -> None:
    names = [*MEMORY_OPTIONS, "lse", "bfloat16", "strided", "grouped", "narrow bias+bfloat16", "far+dilated"]
    names += ["v", "q", "k", "bias+v", "relative+longformer+dropout", "grouped+bfloat16+softcap+sink+causal"]
    check_memory(*[name for name in names if name != "narrow bias"][part::2])


@pytest.mark.full
def test_memory_of_32768_tokens() -> None:
    assert extra_memory("long")["long"] < 200 * 2**20


# Signals

INTERRUPT = """
    import time
    import torch
    from support.backward import Call, training
    from support.processes import interrupt_after
    from regard import masks as M
    from regard._backends.native import attention as _native, core
    from regard._call.make import make
    from regard._call.spec import Options
    from regard.scores import Alibi, RelativeBias

    torch.set_num_threads({threads})
    L = {length}
    q = torch.randn(1, 8, L, 64)
    problem = make(q, q, q, Options(**{options}))
    stats = torch.ones(2, 1, 8, L)  # the result is not used
    small = training(Call(*[q[:, :, :50]] * 3, {{}}, core.info()["isa"]))
    want = small.run()
    for trial in range({times}):
        sent = interrupt_after(0.4 - 0.3 * (trial % 2))
        try:
            _native.backward(problem, q, stats, None, q, None, {wanted})
            print("not interrupted")
        except KeyboardInterrupt:
            print(time.process_time() - sent[0])
        got = small.run()
        assert all(torch.equal(got[n], want[n]) for n in want)
"""
ALL, BIAS = (True, True, True, False, False, False), (False, False, False, True, False, False)


@repeats(2, 48)
@pytest.mark.parametrize(
    ("threads", "options", "wanted"),
    [
        (2, "dict(mask=M.Causal())", ALL),
        (1, "dict(dropout=0.1, softcap=5.0)", ALL),
        (2, "dict(bias=torch.randn(1, 1, 1, 1))", BIAS),
        (2, "dict(mask=M.Documents(torch.arange(L) % 7))", ALL),
    ],
)
def test_ctrl_c(threads: int, options: str, wanted: tuple[bool, ...], times: int) -> None:
    code = INTERRUPT.format(threads=threads, options=options, times=times, wanted=wanted, length=60_000)
    delays = [float(line) for line in script(code).splitlines()]
    assert len(delays) == times
    assert max(delays) < 0.5 * threads, delays


INTERRUPT_AUTOGRAD = """
    import time
    import torch, regard
    from regard import masks as M
    from support.processes import interrupt_after

    torch.set_num_threads(2)
    q = torch.randn(1, 2, 12_000, 64, requires_grad=True)
    out = regard.attention(q, q, q, mask=M.Causal(), impl="native")
    sent = interrupt_after(0.2)
    try:
        out.sum().backward()
        print("not interrupted")
    except KeyboardInterrupt:
        print(time.process_time() - sent[0])
    assert q.grad is None
    part = q.detach()[:, :, :50].requires_grad_()
    regard.attention(part, part, part).sum().backward()
    assert part.grad.isfinite().all()
"""


def test_ctrl_c_in_autograd() -> None:
    assert float(script(INTERRUPT_AUTOGRAD)) < 1


# Tests of the comparison


def test_faults_are_detected() -> None:
    """One wrong key among many, a missing dlse term and a NaN each are faults."""
    t = training(call_of(core.isas()[0], 1, 2, 2, 33, 101, 16, 8, mask=M.Causal()), lse=True)

    class Wrong(Training):
        def run(self, names: Any = None) -> dict[str, Tensor]:
            return wrong

    assert not faults(t)
    wrong = t._replace(call=t.call._replace(options={"mask": M.Window(99, 0)})).run()
    assert faults(Wrong(*t))
    wrong = t._replace(dlse=None).run()
    assert faults(Wrong(*t))
    wrong = t.run()
    wrong["k"] = wrong["k"].clone()
    wrong["k"][0, 0, 0, 0] = NAN
    assert faults(Wrong(*t))


def test_pairs_and_reference_agree() -> None:
    """Both definitions of the expected gradients agree."""
    for index in range(40):
        t = sample(index, 1e6)
        if "dropout" in t.call.options:
            continue
        want = t.expected()
        for name, g in by_pairs(t).items():
            assert norm(g - want[name]) <= 1e-12 * max(norm(want[name]), 1e-3), describe(t)


def test_error_of_a_gradient_that_cancels(isa: str) -> None:
    """A per-row bias shifts whole rows: its gradient is 0, and the result is rounding error."""
    t = training(call_of(isa, 1, 2, 2, 33, 101, 16, 8, bias=torch.randn(33, 1)))
    measured = errors(t, t.run(), pairs_of(t.call))["bias"]
    assert norm(t.expected()["bias"]) < 1e-12 < measured.size
    assert measured.error <= COMPUTED[torch.float32]
