"""Tests of `evidence` against the definition on the full weight matrix in float64."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import facts as F, masks as M
from regard._backends.native import core
from regard._call.make import make as make_problem
from regard.cost import peak_memory
from support import HAVE_CORE, rel_l2
from support.evidence import OPTIONS, every_fact, expected, failures, faults, options_of, run, value_faults
from support.forward import Call

needs_core = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
NATIVE = pytest.param("native", marks=needs_core)
INF = float("inf")


def qk(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns random q and k. `sizes` are B, Hq, Hkv, Lq, Lk, D."""
    B, Hq, Hkv, Lq, Lk, D = sizes
    return torch.randn(B, Hq, Lq, D).to(dtype), torch.randn(B, Hkv, Lk, D).to(dtype)


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_torch_grid(first: int, poison: None) -> None:
    report = failures(range(first, first + 50), 3e6, "torch")
    assert not report, report


@needs_core
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_grid(first: int, poison: None) -> None:
    report = failures(range(first, first + 50), 3e6, "native")
    assert not report, report


@needs_core
@pytest.mark.full
@pytest.mark.parametrize("first", range(200, 3200, 100))
def test_large_grid(first: int, poison: None) -> None:
    report = failures(range(first, first + 100), 3e7, "native")
    assert not report, report


def call_of(name: str, isa: str, *sizes: int, dtype: torch.dtype = torch.float32) -> Call:
    B, Hq, _, Lq, Lk, _ = sizes
    q, k = qk(*sizes, dtype=dtype)
    return Call(q, k, k[..., :3], options_of(name, B, Hq, Lq, Lk), isa)


@needs_core
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(isa: str, name: str, poison: None) -> None:
    messages = faults(call_of(name, isa, 2, 6, 2, 137, 211, 24), every_fact(137, 211), "native")
    assert not messages, messages


@needs_core
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype(isa: str, dtype: torch.dtype, poison: None) -> None:
    for name in ("causal", "everything"):
        call = call_of(name, isa, 1, 4, 2, 259, 263, 40, dtype=dtype)
        messages = faults(call, every_fact(259, 263), "native")
        assert not messages, messages


@needs_core
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "impl"), [*((name, "native") for name in OPTIONS), ("causal", "torch"), ("everything", "torch")]
)
def test_every_option_at_2048_tokens(name: str, impl: str) -> None:
    call = call_of(name, core.isas()[0], 1, 2, 1, 2048, 2048, 64)
    messages = faults(call, every_fact(2048, 2048), impl)
    assert not messages, messages


@needs_core
@pytest.mark.parametrize("name", ["causal", "dilated by head", "packed"])
def test_threads_and_batches_change_no_bit(isa: str, name: str) -> None:
    """The sizes give more chunks of 256 query rows and more key blocks of 192 keys than threads."""
    q, k = qk(2, 4, 2, 1100, 700, 16)
    facts, options = every_fact(1100, 700), options_of(name, 2, 4, 1100, 700) | {"impl": "native"}
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(regard.evidence(q, k, None, *facts, **options))
    assert all(_same(results[0], other) for other in results[1:])
    alone = regard.evidence(q[1], k[1], None, *facts, **options)
    assert _same([_sample(x, 1) for x in results[0]], list(alone))


def _sample(result: Any, b: int) -> Any:
    if isinstance(result, Tensor):
        return result[b]
    if isinstance(result, F.Pyramid):
        return F.Pyramid([x[b] for x in result.levels], result.block)
    if isinstance(result, F.DistanceResult):
        return result._replace(mass=result.mass[b])
    return type(result)(*(x[b] for x in result))


@needs_core
@pytest.mark.parametrize("options", [{}, {"mask": M.Causal(), "sink": torch.tensor([0.3, 0.1])}])
def test_products_beyond_float32(isa: str, options: dict[str, Any], poison: None) -> None:
    """Products overflow float32, scores do not: such rows are computed key by key in double."""
    q, k = qk(1, 2, 1, 37, 230, 4)
    q[:, :, ::3, 2:] = 1e20
    k[..., 2] = 1e20 * torch.rand(230)
    k[..., 3] = -k[..., 2]
    call = Call(q, k, k, options, isa)
    right = expected(call, want := every_fact(37, 230))
    for fact, result, expected_result in zip(want, run(call, want, "native"), right, strict=True):
        assert not value_faults(result, expected_result, 1e-5), fact


@pytest.mark.parametrize("impl", ["reference", "torch", NATIVE])
def test_top_keys_of_a_nan_row_are_valid(impl: str) -> None:
    q, k = qk(1, 1, 1, 3, 9, 4)
    q[0, 0, 1] = float("nan")
    top, largest = regard.evidence(q, k, None, F.TopK(4), F.BlockMax(2), mask=~M.Prefix(2), impl=impl)
    assert top.keys[0, 0, 1].tolist() == [2, 3, 4, 5]
    assert top.weights[0, 0, 1].isnan().all()
    assert not top.weights[0, 0, ::2].isnan().any()
    assert largest.levels[0][0, 0].isnan().tolist() == [[False, True, True, True, True], [False] * 5]


@needs_core
@pytest.mark.full
def test_memory_is_linear() -> None:
    q, k = qk(1, 1, 1, 30_000, 30_000, 64)
    facts = [F.BlockMass(128), F.BlockMax(128), F.TopK(8), F.ColumnMass(), F.Entropy(), F.DistanceHistogram()]
    peak = peak_memory(lambda: regard.evidence(q, k, None, *facts, mask=M.Causal(), impl="native"))
    if peak is None:
        pytest.skip("the system does not report the peak of a process")
    assert peak < 2 * (q.nbytes + k.nbytes)


# The reference against formulas


def test_reference_matches_formulas() -> None:
    """Computes every fact of four queries and five keys from the weight matrix."""
    q, k = qk(1, 1, 1, 4, 5, 3)
    p = regard.weights(q, k, k, mask=M.Causal())[0, 0].double()
    rows, top, mass, entropy, best, histogram, on, sums, largest = (
        regard.evidence(
            q, k, None, F.Rows([2]), F.TopK(2), F.ColumnMass(), F.Entropy(), F.RowMax(),
            F.DistanceHistogram(), F.MassOn([0, 4]), F.BlockMass(2), F.BlockMax(2),
            mask=M.Causal(), impl="reference",
        )
    )  # fmt: skip
    close = {"rtol": 1e-6, "atol": 1e-7, "check_dtype": False}
    torch.testing.assert_close(rows[0, 0], p[2:3], **close)
    torch.testing.assert_close(top.weights[0, 0], p.topk(2).values, **close)
    assert torch.equal(top.keys[0, 0], p.topk(2).indices)
    torch.testing.assert_close(mass[0, 0], p.sum(0), **close)
    nats = torch.tensor([-sum(x * x.log() for x in row if x > 0) for row in p])
    torch.testing.assert_close(entropy.nats[0, 0], nats, **close)
    torch.testing.assert_close(
        entropy.normalized[0, 0], nats / torch.tensor([2.0, 3.0, 4.0, 5.0]).log(), **close
    )
    torch.testing.assert_close(best.weights[0, 0], p.amax(1), **close)
    assert torch.equal(best.keys[0, 0], p.argmax(1))
    assert histogram.distances.tolist() == list(range(-3, 5))
    diagonals = torch.stack([p.diagonal(1 - d).sum() for d in range(-3, 5)])
    torch.testing.assert_close(histogram.mass[0, 0], diagonals, **close)
    torch.testing.assert_close(on[0, 0], p[:, 0] + p[:, 4], **close)
    assert [tuple(x.shape[2:]) for x in sums.levels] == [(2, 3), (1, 2), (1, 1)]
    torch.testing.assert_close(sums.levels[0][0, 0, 1, 1], p[2:4, 2:4].sum(), **close)
    torch.testing.assert_close(sums.levels[2][0, 0, 0, 0], p.sum(), **close)
    torch.testing.assert_close(largest.levels[1][0, 0, 0, 0], p[:4, :4].max(), **close)


def test_entropy_includes_the_sink() -> None:
    q, k = qk(1, 1, 1, 2, 3, 4)
    sink = torch.tensor([0.7])
    p = regard.weights(q, k, k, sink=sink)[0, 0].double()
    with_sink = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1)
    (entropy,) = regard.evidence(q, k, None, F.Entropy(), sink=sink, impl="reference")
    nats = -(with_sink * with_sink.log()).sum(1)
    torch.testing.assert_close(entropy.nats[0, 0].double(), nats, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        entropy.normalized[0, 0].double(), nats / torch.tensor(4.0).log(), rtol=1e-6, atol=1e-6
    )


IMPLS = ["reference", "torch", NATIVE]


@pytest.mark.parametrize("impl", IMPLS)
def test_fully_masked_rows(impl: str) -> None:
    q, k = qk(2, 2, 1, 3, 5, 4)
    options: dict[str, Any] = {"mask": M.Lengths([0, 2]), "impl": impl}
    facts = [F.Rows([1]), F.TopK(3), F.ColumnMass(), F.Entropy(), F.RowMax(), F.MassOn([0]), F.BlockMax(2)]
    rows, top, mass, entropy, best, on, largest = regard.evidence(q, k, None, *facts, **options)
    for x in (rows, top.weights, mass, *entropy, best.weights, on, largest.levels[0]):
        assert not x[0].any()
        assert x[1].any()
    assert (top.keys[0] == -1).all()
    assert (best.keys[0] == -1).all()
    assert (top.keys[1] == -1).sum() == 2 * 3  # two keys are allowed, TopK asks for three
    (entropy,) = regard.evidence(q, k, None, F.Entropy(), sink=torch.zeros(2), **options)
    assert not entropy.nats[0].any()
    assert not entropy.normalized[0].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_one_allowed_key_has_no_entropy(impl: str) -> None:
    q, k = qk(1, 1, 1, 4, 4, 8)
    (entropy,) = regard.evidence(q, k, None, F.Entropy(), mask=M.Causal(), impl=impl)
    assert entropy.nats[0, 0, 0] == 0
    assert entropy.normalized[0, 0, 0] == 0
    assert (entropy.normalized[0, 0, 1:] > 0).all()
    assert (entropy.normalized <= 1 + 1e-6).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_no_keys_and_no_rows(impl: str) -> None:
    q, k = qk(1, 2, 1, 5, 7, 4)
    on, rows = regard.evidence(q, k, None, F.MassOn([]), F.Rows([]), impl=impl)
    assert torch.equal(on, torch.zeros(1, 2, 5))
    assert rows.shape == (1, 2, 0, 7)


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_go_to_the_lower_key(impl: str) -> None:
    q, k = torch.zeros(1, 1, 20, 8), torch.zeros(1, 1, 300, 8)
    top, best = regard.evidence(q, k, None, F.TopK(5), F.RowMax(), impl=impl)
    assert torch.equal(top.keys, torch.arange(5).expand(1, 1, 20, 5))
    assert not best.keys.any()


@pytest.mark.parametrize("impl", IMPLS)
def test_masked_keys_change_no_bit(impl: str) -> None:
    """Masked NaN changes no bit. Attended NaN shows in the rows that attend to it and no others."""
    q, k = qk(1, 2, 1, 40, 40, 8)
    facts = [
        F.Rows([0, 20]), F.TopK(4), F.ColumnMass(), F.Entropy(), F.RowMax(), F.DistanceHistogram(),
        F.MassOn([1, 2]), F.BlockMass(8), F.BlockMax(8),
    ]  # fmt: skip
    mask = M.Causal() & M.Lengths([33])
    clean = regard.evidence(q, k, None, *facts, mask=mask, impl=impl)
    spoilt = k.clone()
    spoilt[:, :, 33:] = torch.tensor([INF, float("nan"), -INF, 1e38, 0.0, 1.0, 2.0, 3.0])
    assert _same(clean, regard.evidence(q, spoilt, None, *facts, mask=mask, impl=impl))
    spoilt[:, :, 17] = float("nan")
    entropy, best, rows = regard.evidence(
        q, spoilt, None, F.Entropy(), F.RowMax(), F.Rows([16, 17]), mask=mask, impl=impl
    )
    assert torch.equal(entropy.nats.isnan()[0, 0], torch.arange(40) >= 17)
    assert torch.equal(best.weights.isnan()[0, 0], torch.arange(40) >= 17)
    assert torch.equal(rows.isnan()[0, 0].sum(-1), torch.tensor([0, 18]))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return all(_same(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, tuple | list) else a == b


# Shapes and dtypes


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lead", "outer"), [((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 1, 3), (2, 1, 3))]
)
def test_outer_dims(impl: str, lead: tuple[int, ...], outer: tuple[int, ...]) -> None:
    q, k = torch.randn(*lead, 4, 8), torch.randn(*lead, 6, 8)
    facts = [F.Rows([1, 2]), F.TopK(9), F.ColumnMass(), F.Entropy(), F.DistanceHistogram(), F.BlockMass(3)]
    rows, top, mass, entropy, histogram, sums = regard.evidence(q, k, None, *facts, impl=impl)
    assert rows.shape == (*outer, 2, 6)
    assert top.weights.shape == top.keys.shape == (*outer, 4, 9)
    assert top.keys.dtype == torch.int64
    assert (top.keys[..., 6:] == -1).all()
    assert mass.shape == (*outer, 6)
    assert entropy.nats.shape == entropy.normalized.shape == (*outer, 4)
    assert histogram.mass.shape == (*outer, 9)
    assert [tuple(x.shape) for x in sums.levels] == [(*outer, 2, 2), (*outer, 1, 1)]
    assert sums.block == 3


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("Lq", "Lk"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sizes(impl: str, Lq: int, Lk: int) -> None:
    q, k = torch.randn(2, 3, Lq, 4), torch.randn(2, 3, Lk, 4)
    facts = [F.TopK(2), F.ColumnMass(), F.Entropy(), F.DistanceHistogram(), F.BlockMass(2)]
    top, mass, entropy, histogram, _ = regard.evidence(q, k, None, *facts, impl=impl)
    assert (top.keys == -1).all()
    assert not mass.any()
    assert not entropy.nats.any()
    assert histogram.mass.shape == (2, 3, 0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(impl: str, dtype: torch.dtype) -> None:
    q, k = qk(1, 2, 2, 9, 9, 8, dtype=dtype)
    rows, top = regard.evidence(q, k, k, F.Rows([0]), F.TopK(2), impl=impl)
    assert rows.dtype == top.weights.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)


@pytest.mark.parametrize("impl", IMPLS)
def test_per_sample_arguments(impl: str) -> None:
    """Per-sample offsets, key sets and query weights give the results of each sample alone."""
    q, k = qk(3, 2, 1, 7, 11, 4)
    offset, keys = torch.tensor([0, 4, 30]), torch.rand(3, 11) < 0.5
    by_row = torch.rand(3, 7)
    facts = [F.MassOn(keys), F.ColumnMass(by_row), F.DistanceHistogram()]
    on, mass, histogram = regard.evidence(q, k, None, *facts, offset=offset, mask=M.Causal(), impl=impl)
    assert histogram.distances.tolist() == list(range(-10, 37))
    for b in range(3):
        facts_b = [F.MassOn(keys[b]), F.ColumnMass(by_row[b]), F.DistanceHistogram()]
        alone = regard.evidence(q[b], k[b], None, *facts_b, offset=int(offset[b]), mask=M.Causal(), impl=impl)
        assert rel_l2(on[b], alone[0]) < 1e-6
        assert rel_l2(mass[b], alone[1]) < 1e-6
        first = int(alone[2].distances[0]) + 10
        assert rel_l2(histogram.mass[b, :, first : first + 17], alone[2].mass) < 1e-6
        assert rel_l2(histogram.mass[b].sum(), alone[2].mass.sum()) < 1e-6


# Rollout


def dense_rollout(layers: list[tuple[Tensor, Tensor, dict[str, Any]]]) -> Tensor:
    """Returns the full rollout matrix as a product of layer matrices."""
    total = torch.eye(layers[0][0].shape[-2], dtype=torch.float64)
    for q, k, options in layers:
        a = regard.weights(q.double(), k.double(), k.double(), **options).mean(-3)
        a = a + torch.eye(a.shape[-1], dtype=torch.float64)
        total = a / a.sum(-1, keepdim=True) @ total
    return total


@pytest.mark.parametrize("impl", IMPLS)
def test_rollout_is_a_row_of_the_product(impl: str) -> None:
    masks = ({"mask": M.Causal()}, {}, {"mask": ~M.Prefix(3) & M.Causal(), "sink": torch.randn(4).double()})
    layers = [(*qk(2, 4, 2, 23, 23, 8, dtype=torch.float64), options) for options in masks]
    product = dense_rollout(layers)
    for row in (0, 2, 11, -1):
        rollout = regard.rollout(layers, row, impl=impl)
        assert rollout.shape == (2, 23)
        assert rel_l2(rollout, product[:, row]) < 1e-12
        torch.testing.assert_close(rollout.sum(-1), torch.ones(2, dtype=torch.float64))


def test_rollout_without_heads() -> None:
    q, k = torch.randn(6, 4), torch.randn(6, 4)
    assert rel_l2(regard.rollout([(q, k)], 2), dense_rollout([(q[None], k[None], {})])[2]) < 1e-6


# Facts as values, errors


def test_facts_are_values() -> None:
    assert F.TopK(3) == F.TopK(3) != F.TopK(4)
    assert F.BlockMass(3) != F.BlockMax(3)
    assert hash(F.MassOn([1, 2])) == hash(F.MassOn(torch.tensor([1, 2])))
    assert F.MassOn([1, 2]) == F.MassOn(torch.tensor([1, 2])) != F.MassOn([1, 3])
    assert repr(F.Rows([1, -1])) == "Rows((1, -1))"
    assert repr(F.Entropy()) == "Entropy()"
    assert repr(F.MassOn([True, False] * 20)) == "MassOn(<bool (40,)>)"
    with pytest.raises(AttributeError):
        F.TopK(3).k = 4  # type: ignore[misc]
    keys = torch.tensor([1, 2])
    fact = F.MassOn(keys)
    keys[0] = 7
    assert fact == F.MassOn([1, 2])
    assert F.Rows(np.arange(3)) == F.Rows(range(3)) == F.Rows(torch.arange(3))
    assert F.Rows(2) == F.Rows([2])
    for fact in (F.TopK(3), F.MassOn([1]), F.Rows(range(3)), F.ColumnMass(torch.ones(2)), F.BlockMax(4)):
        assert pickle.loads(pickle.dumps(fact)) == fact


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: F.TopK(0), ValueError, r"TopK\(k\): expected an integer from 1"),
        (lambda: F.TopK(2.0), TypeError, r"TopK\(k\): expected an int"),
        (lambda: F.BlockMax(0), ValueError, r"BlockMax\(block\): expected"),
        (lambda: F.Rows("abc"), TypeError, r"Rows\(indices\): expected integers, got str 'abc'"),
        (lambda: F.Rows([0.5]), TypeError, r"Rows\(indices\): expected integers"),
        (lambda: F.MassOn([0.5]), TypeError, r"MassOn\(keys\): expected a bool tensor"),
        (lambda: F.MassOn([[1, 2]]), ValueError, r"MassOn\(keys\): expected a list of keys"),
        (lambda: F.ColumnMass([1.0]), TypeError, r"ColumnMass\(weights\): expected a float tensor"),
    ],
)
def test_wrong_facts(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


X = torch.randn(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("want", "options", "error", "message"),
    [
        ([], {}, ValueError, "want: expected at least one fact"),
        ([F.Entropy], {}, TypeError, r"got the class Entropy; call it: Entropy\(\)"),
        ([F.Fact()], {}, TypeError, "want: expected facts"),
        (["entropy"], {}, TypeError, "want: expected facts, such as regard.Entropy"),
        ([F.Rows([4])], {}, ValueError, r"Rows\(indices\): expected indices below Lq = 4, got 4"),
        ([F.Rows([-5])], {}, ValueError, r"got -5"),
        ([F.MassOn([4])], {}, ValueError, r"MassOn\(keys\): expected keys below Lk = 4, got \[4\]"),
        ([F.MassOn(torch.ones(5).bool())], {}, ValueError, r"broadcastable to \(1, 4\), got \(5,\)"),
        ([F.ColumnMass(torch.ones(2, 4))], {}, ValueError, r"ColumnMass\(weights\).*got \(2, 4\)"),
        ([F.Entropy()], {"impl": "fast"}, ValueError, "impl: expected one of"),
        ([F.Entropy()], {"dropout": 0.1}, TypeError, "dropout"),
        ([F.Entropy()], {"softcap": -1.0}, ValueError, "softcap"),
        ([F.Entropy()], {"mask": M.Lengths([9])}, ValueError, "expected lengths up to Lk"),
    ],
)
def test_wrong_calls(want: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        regard.evidence(X, X, None, *want, **options)


def test_wrong_tensors() -> None:
    with pytest.raises(ValueError, match="v: expected Lk = 4 rows"):
        regard.evidence(X, X, X[:, :, :3], F.Entropy())
    with pytest.raises(TypeError, match=r"v: expected a torch\.Tensor"):
        regard.evidence(X, X, F.Entropy(), F.RowMax())  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="expected plain tensors with values"):
        torch.vmap(lambda x: regard.evidence(x, x, None, F.ColumnMass())[0])(X)
    with pytest.raises(NotImplementedError, match="expected plain tensors with values"):
        regard.evidence(X.to("meta"), X.to("meta"), None, F.Entropy())
    long = torch.empty(1, 1, 100_000, 1, device="meta")
    with pytest.raises(ValueError, match="at most 2\\*\\*28 blocks, got 2,500,000,000; use a larger block"):
        F.BlockMass(2).check(make_problem(long, long, long).spec)


@pytest.mark.parametrize(
    ("layers", "row", "error", "message"),
    [
        ([], 0, ValueError, "layers: expected at least one"),
        ([(X,)], 0, TypeError, r"layers\[0\]: expected \(q, k\)"),
        ([(X, X[:, :, :3])], 0, ValueError, r"layers\[0\]: expected q and k of equal length"),
        ([(X, X[0, 0, 0])], 0, ValueError, r"layers\[0\]: expected q and k of equal length"),
        ([(X, X, M.Causal())], 0, TypeError, r"layers\[0\]: expected options as a dict, got Causal"),
        ([(X, X), (X[:, :, :3], X[:, :, :3])], 0, ValueError, r"layers\[1\]: expected L = 4 tokens .* got 3"),
        ([(X, X)], 4, ValueError, "row: expected a token below L = 4, got 4"),
        ([(X, X)], 1.5, TypeError, "row: expected an int"),
    ],
)
def test_wrong_rollouts(layers: Any, row: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        regard.rollout(layers, row)


def test_facts_carry_no_gradient() -> None:
    x = X.clone().requires_grad_()
    entropy, top = regard.evidence(x, x, None, F.Entropy(), F.TopK(1))
    assert not entropy.nats.requires_grad
    assert not top.weights.requires_grad


def test_evidence_is_a_tuple() -> None:
    evidence = regard.evidence(X, X, None, F.Entropy(), F.TopK(2))
    assert isinstance(evidence, tuple)
    assert len(evidence) == 2
    assert evidence.want == (F.Entropy(), F.TopK(2))
    assert repr(evidence) == "Evidence(Entropy(), TopK(2))"
    unpickled = pickle.loads(pickle.dumps(evidence))
    assert unpickled.want == evidence.want
    assert _same(unpickled, evidence)
    (only,) = regard.evidence(X, X, None, F.ColumnMass())
    assert only.shape == (1, 2, 4)
