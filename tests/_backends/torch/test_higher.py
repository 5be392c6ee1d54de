"""Second derivatives and forward mode against autograd through the reference; NaN, memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.autograd import forward_ad

import regard
from regard import masks as M
from regard._backends.torch import tiles as _tiles
from regard._backends.torch.higher import double_backward, jvp
from regard._backends.torch.tiles import inputs
from regard._call.layout import heads_4d, pairs_4d
from regard._call.make import make
from regard._call.spec import Options, Problem, learned
from regard.masks._mask import part_of
from regard.masks._pairs import Rectangle
from regard.scores import Alibi, RelativeBias
from support import ROOT, assert_close
from support.forward import Sampler, doubled
from support.strategies import Case, mask_strategy

INF, NAN = float("inf"), float("nan")
Maybe = Tensor | None
# PyTorch's forward mode imports a module that uses torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

Leaves = list[Maybe]  # q, k, v, the bias's tensor, sink
# Limit of the relative L2 error against float64. If the expected values have a root mean square
# below 1, the error is absolute, because the gradient of a per-row bias is zero. The gradient of a
# broadcast bias is a sum over pairs, which may cancel: its error is relative to the norm of the
# summands. Results for 16-bit inputs have float32's error plus their own rounding.
LIMIT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


# Calls


def leaves_of(call: tuple[Tensor, ...], options: dict[str, Any]) -> Leaves:
    return [*call[:3], learned(options.get("bias")), options.get("sink")]


def with_leaves(x: Leaves, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with the tensors of bias and sink replaced."""
    bias, sink = options.get("bias"), options.get("sink")
    if isinstance(bias, Alibi):
        bias = Alibi(x[3])
    elif isinstance(bias, RelativeBias):
        bias = RelativeBias(x[3], bidirectional=bias.bidirectional, max_distance=bias.max_distance)
    elif bias is not None:
        bias = x[3]
    return options | {"bias": bias, "sink": sink if sink is None else x[4]}


def canonical(x: Leaves, options: dict[str, Any]) -> Problem:
    """Returns the canonical Problem (four dims), differentiable with respect to the leaves."""
    p = make(*x[:3], Options(**with_leaves(x, options), return_lse=True))
    bias = pairs_4d(p.spec, p.bias) if isinstance(p.bias, Tensor) else p.bias
    q, k, v = (heads_4d(p.spec, y) for y in (p.q, p.k, p.v))
    return p._replace(q=q, k=k, v=v, bias=bias, mask=None)


def reference(x: Leaves, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return regard.attention(*x[:3], **with_leaves(x, options), return_lse=True, impl="reference")


def present(x: list[Maybe] | tuple[Maybe, ...]) -> list[Tensor]:
    return [y for y in x if y is not None]


def random_like(x: Leaves) -> Leaves:
    return [None if y is None else torch.randn_like(y) for y in x]


def to_double(x: Leaves) -> Leaves:
    return [None if y is None else y.detach().double().requires_grad_() for y in x]


# Both implementations


def second_order(x: Leaves, options: dict[str, Any], t: Leaves, dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """Returns `double_backward`'s gradients of the leaves, then of dout and dlse."""
    p = canonical(x, options)
    B, Hq, Lq = p.spec.B, p.spec.Hq, p.spec.Lq
    tangents = inputs(canonical(t, options))
    got = double_backward(p, dout.reshape(B, Hq, Lq, -1), dlse.reshape(B, Hq, Lq), tangents)
    assert [g is None for g in got[:6]] == [y is None for y in inputs(p)]
    *grads, ddout, ddlse = present(got)
    canonical_inputs = present(inputs(p))
    assert [(g.shape, g.dtype) for g in grads] == [(y.shape, y.dtype) for y in canonical_inputs]
    out, lse = jvp(p, tangents)
    assert torch.equal(out, ddout)
    assert torch.equal(lse, ddlse)
    leaf_grads = torch.autograd.grad(canonical_inputs, present(x), grads)
    return [*leaf_grads, out.reshape(dout.shape), lse.reshape(dlse.shape)]


def second_order_by_reference(
    x: Leaves, options: dict[str, Any], t: Leaves, dout: Tensor, dlse: Tensor
) -> list[Tensor]:
    """Computes the results of `second_order` in float64, by double autograd and forward mode."""
    dy = (dout.double(), dlse.double())
    grads = torch.autograd.grad(reference(x, options), present(x), dy, create_graph=True)
    t64 = [y.double() for y in present(t)]
    leaf_grads = torch.autograd.grad(grads, present(x), t64, allow_unused=True, materialize_grads=True)
    with forward_ad.dual_level():
        duals = iter([forward_ad.make_dual(y.detach(), ty) for y, ty in zip(present(x), t64, strict=True)])
        results = reference([None if y is None else next(duals) for y in x], options)
        tangents = [forward_ad.unpack_dual(y).tangent for y in results]
    zeros = [torch.zeros_like(y) if ty is None else ty for y, ty in zip(results, tangents, strict=True)]
    return [*leaf_grads, *zeros]


def norm_of_summands(
    x: Leaves, options: dict[str, Any], t: Leaves, dout: Tensor, dlse: Tensor
) -> dict[int, float]:
    """Returns the norm of the gradient of a bias tensor expanded to all pairs, by index of the bias."""
    if not isinstance(options.get("bias"), Tensor) or x[3] is None or t[3] is None:
        return {}
    pairs = (*dlse.shape, present(x)[1].shape[-2])
    bias, tangent = x[3].detach().expand(pairs).clone().requires_grad_(), t[3].expand(pairs)
    x, t = [*x[:3], bias, x[4]], [*t[:3], tangent, t[4]]
    return {3: second_order_by_reference(x, options, t, dout, dlse)[3].norm().item()}


def far_apart(got: Tensor, want: Tensor, computed: torch.dtype, summands: float = 0.0) -> bool:
    """Returns whether the error of `got` exceeds the limit, or is NaN."""
    error = (got.double() - want).norm().item()
    size = max(want.norm().item(), want.numel() ** 0.5, summands)
    return not error <= (LIMIT[computed] + (LIMIT[got.dtype] if got.dtype is not computed else 0)) * size


def fault(seed: int, work: float, double: bool) -> str | None:
    """Compares derivatives of a sampled call with the reference. Returns a message or None.

    The call runs in its own dtype, or in float64 if `double`.
    """
    call = Sampler(seed, work, [""]).call()
    x, options = leaves_of(call, call.options), call.options
    x64, options64 = to_double(x), {name: doubled(y) for name, y in options.items()}
    if double:
        x, options = x64, options64
    x = [None if y is None else y.detach().requires_grad_() for y in x]
    out, lse = reference(x, options)
    t, dout, dlse = random_like(x), torch.randn_like(out), torch.randn_like(lse)
    reach = max(call.q.shape[-2], call.k.shape[-2]) if isinstance(options.get("bias"), Alibi) else 1
    t[3] = None if t[3] is None else t[3] / reach
    got = second_order(x, options, t, dout, dlse)
    want = second_order_by_reference(x64, options64, t, dout, dlse)
    if reach > 1:  # ALiBi: the slope's gradient sums distances, so divide by the largest one
        got[3], want[3] = got[3] / reach, want[3] / reach
    norms = norm_of_summands(x64, options64, t, dout, dlse)
    compared = enumerate(zip(got, want, strict=True))
    bad = [n for n, (a, b) in compared if far_apart(a, b, lse.dtype, norms.get(n, 0.0))]
    apart = [f"{n}: {(got[n].double() - want[n]).norm():.3g} of {want[n].norm():.3g}" for n in bad]
    return f"seed {seed}: {apart} in {call}" if bad else None


def faults(seeds: range, work: float, double: bool) -> str:
    return "\n".join(text for seed in seeds if (text := fault(seed, work, double)))


@pytest.fixture(params=[37, 1500, 2**19])
def pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets the tile size: some heads of one row, a few rows, or whole samples."""
    monkeypatch.setattr(_tiles, "PAIRS", request.param)
    return int(request.param)


def test_in_float64(pairs: int) -> None:
    assert not faults(range(pairs, pairs + 40), 1e4 if pairs == 37 else 3e5, double=True)


def test_in_the_dtype_of_the_call() -> None:
    assert not faults(range(70), 3e5, double=False)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 2000, 250))
def test_many(first: int, pairs: int) -> None:
    assert not faults(range(first, first + 250), 3e4 if pairs == 37 else 1e6, double=True)


# Finite differences


B, HQ, HKV, LQ, LK, D, DV = 2, 4, 2, 5, 7, 3, 2
NUMERIC: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": M.Causal(), "sink": torch.tensor([0.3, -1.0, 2.0, 0.1]).double()},
    "capped": {"mask": M.Window(2, 1), "softcap": 1.5, "bias": Alibi.standard(HQ, dtype=torch.float64)},
    "dropped": {"dropout": 0.4, "seed": 3, "offset": torch.tensor([-2, 4]), "mask": M.Causal()},
    "relative": {"bias": RelativeBias(torch.linspace(-1, 1, 8 * HQ).double().view(8, HQ), max_distance=6)},
    "bias": {"bias": torch.linspace(-1, 1, HQ * LK).double().view(HQ, 1, LK), "scale": 0.9, "softcap": 2.0},
}


def small(options: dict[str, Any]) -> Leaves:
    q, k, v = ((HQ, LQ, D), (HKV, LK, D), (HKV, LK, DV))
    return leaves_of(tuple(torch.randn(B, *shape).double() for shape in (q, k, v)), options)


@pytest.mark.parametrize("name", NUMERIC)
def test_against_differences(name: str) -> None:
    """The derivatives match central differences of the reference's results and gradients."""
    options, step = NUMERIC[name], 1e-5
    x = small(options)
    t = random_like(x)
    dy = torch.randn(B, HQ, LQ, DV).double(), torch.randn(B, HQ, LQ).double()

    def shifted(by: float) -> list[Tensor]:
        leaves = [
            None if a is None or b is None else (a + by * b).requires_grad_()
            for a, b in zip(x, t, strict=True)
        ]
        results = reference(leaves, options)
        lse = torch.where(results[1] == -INF, 0.0, results[1])
        return [*torch.autograd.grad(results, present(leaves), dy), results[0].detach(), lse.detach()]

    got = second_order([y if y is None else y.requires_grad_() for y in x], options, t, *dy)
    for actual, high, low in zip(got, shifted(step), shifted(-step), strict=True):
        assert_close(actual, (high - low) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["capped", "relative"])
def test_double_backward_is_differentiable(name: str) -> None:
    options = NUMERIC[name]
    x = [y if y is None else y.requires_grad_() for y in small(options)]
    t, dout = inputs(canonical(random_like(x), options)), torch.randn(B, HQ, LQ, DV).double()

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        p = canonical([*tensors, None], options)
        return tuple(present(double_backward(p, dout, None, t)))

    assert torch.autograd.gradcheck(run, present(x), fast_mode=True)


# Guarantees


def run_both(x: Leaves, options: dict[str, Any]) -> list[Tensor]:
    """Runs jvp and double_backward on float32 tensors with fixed random tangents."""
    with torch.autocast("cpu", enabled=False):  # autocast would convert the inputs
        p, generator = canonical(x, options), torch.Generator().manual_seed(5)
    t = [None if y is None else torch.randn(y.shape, generator=generator) for y in inputs(p)]
    dout = torch.randn(*p.q.shape[:3], p.v.shape[3], generator=generator)
    dlse = torch.randn(p.q.shape[:3], generator=generator)
    return [*jvp(p, t), *present(double_backward(p, dout, dlse, t))]


def tensors(Hq: int, Hkv: int, Lq: int, Lk: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, Hq, Lq, 5), torch.randn(2, Hkv, Lk, 5), torch.randn(2, Hkv, Lk, 3)


HIDING: dict[str, dict[str, Any]] = {
    "mask": {"mask": M.Lengths([9, 9]) & M.Window(4, 2)},
    "bias": {"bias": torch.zeros(1, 1, 1, 13).masked_fill(torch.arange(13) >= 9, -INF)},
    "capped": {"mask": M.Dense(torch.arange(13) < torch.arange(1, 12)[:, None] % 10), "softcap": 2.0},
    "relative": {
        "bias": RelativeBias(torch.tensor([[0.0, 0, 1, -INF] * 2] * 4).T, max_distance=3),
        "offset": -9,
    },
    "sink": {"mask": M.Prefix(9) & ~M.Window(1, 1), "sink": torch.randn(4), "dropout": 0.2, "seed": 1},
}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", HIDING)
def test_masked_keys_change_no_bit(name: str, bad: float, pairs: int) -> None:
    """Keys from 9 on are masked. Non-finite values there give the same bits as zeros."""
    options, (q, k, v) = HIDING[name], tensors(4, 2, 11, 13)
    k[:, :, 9:], v[:, :, 9:] = 0.0, 0.0
    want = run_both(leaves_of((q, k, v), options), options)
    k[:, 0, 9:], v[:, 1, 10:, 1] = bad, bad
    got = run_both(leaves_of((q, k, v), options), options)
    assert not any(y.isnan().any() for y in want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("where", [0, 1, 2])
def test_attended_nan_reaches_only_dependent_results(where: int, pairs: int) -> None:
    """NaN in token 6 of one head reaches the rows that attend to it and the keys of these rows."""
    options, x = {"mask": M.Window(2, 0), "offset": 0}, tensors(4, 4, 13, 13)
    clean = run_both(leaves_of(x, options), options)
    x[where][0, 1, 6, 1] = NAN
    rows, keys = torch.zeros(2, 2, 4, 13, 1, dtype=torch.bool)
    last = 6 if where == 0 else 8
    rows[0, 1, 6 : last + 1], keys[0, 1, 4 : last + 1] = True, True
    out, lse, dq, dk, dv, ddout, ddlse = zip(run_both(leaves_of(x, options), options), clean, strict=True)
    for got, want in (out, dq, ddout, lse, ddlse):
        check_nan_rows(got, want, rows)
    for got, want in (dk, dv):
        check_nan_rows(got, want, keys)


def test_nan_bias_reaches_only_its_row(pairs: int) -> None:
    options, x = (
        {"mask": M.Window(2, 0), "offset": 0, "bias": torch.randn(2, 4, 13, 13)},
        tensors(4, 4, 13, 13),
    )
    clean = run_both(leaves_of(x, options), options)
    options["bias"][0, 1, 6, :5] = NAN  # type: ignore[index]
    row, keys = torch.zeros(2, 2, 4, 13, 1, dtype=torch.bool)
    row[0, 1, 6], keys[0, 1, 4:7] = True, True
    got = run_both(leaves_of(x, options), options)
    out, lse, dq, dk, dv, dbias, ddout, ddlse = zip(got, clean, strict=True)
    for result, want in (out, dq, ddout, lse, ddlse):
        check_nan_rows(result, want, row)
    for result, want in (dk, dv):
        check_nan_rows(result, want, keys)
    assert torch.equal(dbias[0].isnan(), row & keys.mT)


def check_nan_rows(got: Tensor, clean: Tensor, touched: Tensor) -> None:
    """Checks that touched rows are all NaN and other rows are bitwise equal to the clean ones."""
    touched = touched[..., 0] if got.ndim == 3 else touched.expand_as(got)
    assert torch.equal(got.isnan(), touched)
    assert torch.equal(got[~touched], clean[~touched])


def test_fully_masked_rows(pairs: int) -> None:
    """Results are zero even for non-finite dout. With a sink, the LSE's tangent is the sink's."""
    q, k, v = tensors(4, 2, 7, 5)
    for sink in (None, torch.randn(4)):
        options = {"mask": M.Causal(), "offset": -3, "sink": sink}
        p = canonical(leaves_of((q, k, v), options), options)
        t = [None if y is None else torch.ones_like(y) for y in inputs(p)]
        dout, dlse = torch.randn(2, 4, 7, 3), torch.randn(2, 4, 7)
        dout[:, :, 0], dlse[:, :, 1] = NAN, INF
        dq, dk, dv, _, _, dsink, ddout, ddlse = double_backward(p, dout, dlse, t)
        assert all(not y.isnan().any() for y in present([dq, dk, dv, dsink, ddout, ddlse]))
        assert dq is not None
        assert ddout is not None
        assert not dq[:, :, :3].any()
        assert not ddout[:, :, :3].any()
        assert torch.equal(ddlse[:, :, :3], torch.full((2, 4, 3), 0.0 if sink is None else 1.0))  # type: ignore[index]


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 3, 0), (0, 3, 5)])
def test_empty_sizes(sizes: tuple[int, int, int]) -> None:
    H, Lq, Lk = sizes
    options = {"sink": torch.randn(H), "mask": M.Causal()}
    out, lse, *grads = run_both(leaves_of(tensors(H, H, Lq, Lk), options), options)
    assert out.shape == (2, H, Lq, 3)
    assert not out.any()
    assert Lk or not any(g.any() for g in grads[:4])  # only the sink's tangent remains
    assert not Lq or not H or lse.all()


def test_tangents_of_masked_bias_change_nothing() -> None:
    bias = torch.zeros(1, 1, 5, 5).masked_fill(torch.eye(5) > 0, -INF)
    x = leaves_of(tensors(2, 2, 5, 5), {"bias": bias})
    p = canonical(x, {"bias": bias})
    t = [torch.zeros_like(y) for y in (p.q, p.k, p.v)]
    hidden = torch.zeros_like(bias).masked_fill(torch.eye(5) > 0, NAN)
    assert not any(y.any() for y in jvp(p, [*t, hidden, None, None]))


def test_no_tangent_is_a_tangent_of_zero() -> None:
    options = {"bias": Alibi.standard(4), "sink": torch.randn(4), "mask": M.Causal()}
    p = canonical(leaves_of(tensors(4, 2, 7, 9), options), options)
    dout, no_tangents = torch.randn(2, 4, 7, 3), [None] * 6
    *grads, ddlse = double_backward(p, dout, None, no_tangents)
    assert ddlse is None
    assert grads[3] is None
    assert not any(y.any() for y in present(grads))
    only_v = [None, None, torch.randn_like(p.v), None, None, None]
    zeros = [
        torch.zeros_like(y) if t is None and y is not None else t
        for y, t in zip(inputs(p), only_v, strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(jvp(p, only_v), jvp(p, zeros), strict=True))


def test_autocast_changes_nothing() -> None:
    x = leaves_of(tensors(4, 2, 7, 9), {})
    want = run_both(x, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run_both(x, {})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# Rectangles of masks


@given(case=mask_strategy(), data=st.data())
def test_mask_of_a_rectangle(case: Case, data: st.DataObject) -> None:
    """`part_of` gives the mask of a rectangle of samples, heads and rows."""

    def random_slice(size: int) -> slice:
        start = data.draw(st.integers(0, size - 1))
        return slice(start, data.draw(st.integers(start + 1, size)))

    samples, heads, rows = random_slice(case.B), random_slice(case.heads), random_slice(case.Lq)
    program = case.mask.lower()
    offsets = torch.tensor(case.offsets)[samples] + rows.start
    rectangle_mask = part_of(program.code, program.bind(case.batch), Rectangle(samples, heads, rows, case.Lk))
    want = case.dense()[samples, heads, rows]
    got = rectangle_mask.to_dense(rows.stop - rows.start, case.Lk, offsets)
    assert torch.equal(got.expand_as(want), want)


# Memory


def test_memory_is_linear() -> None:
    """8192 tokens with one head take less than a third of the memory of one n x n tensor."""
    code = """
        import torch
        from support.peak_memory import measure
        from regard import masks as M
        from regard._backends.torch.higher import double_backward
        from regard._call.make import make
        from regard._call.spec import Options

        def run(x):
            problem = make(x, x, x, Options(mask=M.Causal(), return_lse=True))
            double_backward(problem, x, x[..., 0], (x, x, x, None, None, None))

        torch.set_num_threads(1)
        x = torch.randn(1, 1, 8192, 32)
        run(x[:, :, :1024])  # the first call also loads code
        print(measure(lambda: run(x)))
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True,
        cwd=ROOT / "tests",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    assert int(process.stdout) < 8192 * 8192 * 4 / 3, process.stdout
