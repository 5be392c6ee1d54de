"""Native forward kernels against the float64 reference, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from regard import masks as M
from regard._backends.native import core
from regard.scores import Alibi
from support import HAVE_CORE, assert_close, rel_l2
from support.forward import DTYPES, GROUPS, INF, WIDTHS, Call, failures, faults, fused
from support.options import BIAS_SHAPES, NAMES, bias_of, make, options_of
from support.strategies import Case, mask_strategy

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


@pytest.mark.parametrize("first", range(0, 600, 50))
def test_grid(first: int, poison: None) -> None:
    report = failures(range(first, first + 50), 1e7)
    assert not report, report


@pytest.mark.full
@pytest.mark.parametrize("first", range(600, 6600, 100))
def test_large_grid(first: int, poison: None) -> None:
    report = failures(range(first, first + 100), 6e7)
    assert not report, report


# Sizes with every remainder modulo the block sizes of the kernels: 6 keys, 6 columns, 16 rows,
# 8 lanes, 96 keys.


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_queries(isa: str, dtype: torch.dtype, poison: None) -> None:
    for Lq in [*range(1, 40), 47, 48, 49, 63, 64, 65, 127, 128, 129]:
        call = make(isa, 1, 2, 1, Lq, 21, 9, 5, dtype=dtype, mask=M.Causal())
        assert not faults(call), call


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_keys(isa: str, dtype: torch.dtype, poison: None) -> None:
    for Lk in [*range(1, 40), *range(90, 104), 191, 192, 193]:
        call = make(isa, 1, 2, 2, 17, Lk, 8, 8, dtype=dtype)
        assert not faults(call), call


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(isa: str, dtype: torch.dtype, poison: None) -> None:
    for n in [*range(1, 34), *WIDTHS]:
        for call in (
            make(isa, 1, 1, 1, 5, 7, n, 3, dtype=dtype),
            make(isa, 1, 1, 1, 5, 7, 3, n, dtype=dtype),
        ):
            assert not faults(call), call


@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_heads(isa: str, group: int, poison: None) -> None:
    for options in ({}, {"mask": M.Causal()}, {"bias": Alibi.standard(2 * group), "dropout": 0.3, "seed": 1}):
        call = make(isa, 2, 2 * group, 2, 19, 37, 16, 24, **options)
        assert not faults(call), call


def test_broadcast_batches(isa: str, poison: None) -> None:
    q, k, v = (
        torch.randn(3, 2, 5, 8),
        torch.randn(1, 2, 7, 8),
        torch.randn(3, 1, 7, 8)[:, :1].expand(3, 2, 7, 8),
    )
    assert not faults(Call(q, k, v, {}, isa))
    assert not faults(Call(q[:1], k, v, {"mask": M.Lengths([7, 0, 3])}, isa))


@pytest.mark.parametrize("shape", BIAS_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_broadcasts(isa: str, dtype: torch.dtype, shape: tuple[int, ...], poison: None) -> None:
    for bias in (torch.randn(shape), torch.randn(shape).to(dtype)):
        call = make(isa, 2, 4, 2, 17, 9, 8, 8, dtype=dtype, bias=bias)
        assert not faults(call), call


@pytest.mark.parametrize("D", WIDTHS)
def test_error_beside_the_fused_kernel(isa: str, D: int) -> None:
    """The error is at most 1.5x the fused kernel's, plus one rounding.

    The sizes are large enough for both errors to be averages.
    """
    call = make(isa, 1, 4, 4, 64, 128, D, D)
    out, want, fused_out = call.run()[0], call.expected()[0], fused(call)
    assert fused_out is not None
    assert rel_l2(out, want) <= 1.5 * rel_l2(fused_out, want) + torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("factor", [8, 64])
def test_large_scores(isa: str, factor: int) -> None:
    """Rows are nearly one-hot, so the error of the scores dominates, as in every float32 kernel."""
    call = make(isa, 1, 4, 4, 64, 128, 64, 64)
    call = call._replace(q=call.q * factor, k=call.k * factor)
    out, want, fused_out = call.run()[0], call.expected()[0], fused(call)
    assert fused_out is not None
    assert rel_l2(out, want) <= 1.5 * rel_l2(fused_out, want) + torch.finfo(torch.float32).eps / 2


# Masks and options together


@given(
    case=mask_strategy(sizes=(1, 2, 5, 17, 33)),
    isa=st.sampled_from(core.isas() or ["none"]),
    dtype=st.sampled_from(DTYPES),
    widths=st.tuples(st.sampled_from((1, 3, 8, 11)), st.sampled_from((1, 4, 9))),
    bias=st.sampled_from(("none", "none", "tensor", "alibi", "relative")),
    softcap=st.sampled_from((None, None, 2.0)),
    sink=st.booleans(),
    dropout=st.sampled_from((0.0, 0.0, 0.3)),
)
def test_masks_and_options(
    case: Case, isa: str, dtype: torch.dtype, widths: tuple[int, int], **chosen: Any
) -> None:
    q = torch.randn(*case.batch, case.heads, case.Lq, widths[0], dtype=dtype)
    k = torch.randn(*case.batch, case.heads, case.Lk, widths[0], dtype=dtype)
    v = torch.randn(*case.batch, case.heads, case.Lk, widths[1], dtype=dtype)
    options = {"mask": case.mask, "offset": case.offset, "softcap": chosen["softcap"]}
    options |= {"dropout": chosen["dropout"], "seed": 5} | bias_of(chosen["bias"], case, dtype)
    if chosen["sink"]:
        options["sink"] = torch.randn(case.heads)
    call = Call(q, k, v, options, isa)
    assert not faults(call), call


@pytest.mark.parametrize("first", NAMES)
def test_pairs_of_options(isa: str, first: str, poison: None) -> None:
    options = options_of(4, 33, 101)
    for second in NAMES:
        call = make(isa, 2, 4, 2, 33, 101, 16, 8, **(options[first] | options[second]))
        assert not faults(call), call


@pytest.mark.parametrize("name", NAMES)
def test_options_at_the_end_of_a_key_block(isa: str, name: str, poison: None) -> None:
    for Lk in (191, 192, 193):
        call = make(isa, 2, 4, 2, 33, Lk, 16, 8, **options_of(4, 33, Lk)[name])
        assert not faults(call), call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [None, 0, -9, torch.tensor([0, 151])])
def test_edges_of_windows(isa: str, dtype: torch.dtype, offset: Any, poison: None) -> None:
    """The edges cross tiles of keys, the halves of panels, chains of sums and key blocks."""
    for left in (0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 95, 96, 97, 193):
        for right in (0, 5):
            mask = M.Window(left, right)
            call = make(isa, 2, 2, 1, 67, 203, 8, 8, dtype=dtype, mask=mask, offset=offset)
            assert not faults(call), call


@pytest.mark.parametrize("factor", [8.0, 40.0])
@pytest.mark.parametrize("first", [1, 96, 191, 192, 193, 200])
def test_scores_that_grow_suddenly(isa: str, first: int, factor: float, poison: None) -> None:
    """From key `first` on, all scores of even rows exceed those before; those of odd rows are lower."""
    call = make(isa, 1, 2, 2, 34, 389, 16, 8)
    call.q[..., 0], call.k[..., 0] = torch.tensor([1.0, -1.0]).repeat(17), 0
    call.k[..., first:, 0] = factor
    for bias in (None, torch.zeros(389).index_fill(0, torch.tensor([0, 5, first, first + 1, 388]), -INF)):
        case = call._replace(options={"bias": bias, "mask": M.Window(300, 60)})
        assert not faults(case), case


def test_masked_nan_at_the_edges_of_windows(isa: str) -> None:
    """Rows of a panel that meets NaN are NaN if they may attend to it, and correct if they may not."""
    mask, q, k, v = M.Window(40, 0), *(torch.randn(1, 2, 400, 16) for _ in range(3))
    call = Call(q, k, v, {"mask": mask}, isa)
    want = call.run()[0]
    for x in (k, v):
        x[:, :, 250:260] = torch.nan
    out = call.run()[0]
    reached = torch.zeros(400, dtype=torch.bool)
    reached[250:300] = True
    assert out[:, :, reached].isnan().all()
    assert_close(out[:, :, ~reached], want[:, :, ~reached])


def test_all_options_at_once(isa: str, poison: None) -> None:
    for dtype in DTYPES:
        options = {
            "mask": M.Causal() & M.Lengths([101, 40]),
            "bias": torch.randn(1, 4, 33, 101),
            "softcap": 3.0,
        }
        options |= {
            "sink": torch.randn(4),
            "dropout": 0.2,
            "seed": 3,
            "offset": torch.tensor([60, 68]),
            "scale": 0.2,
        }
        call = make(isa, 2, 4, 2, 33, 101, 16, 8, dtype=dtype, **options)
        assert not faults(call), call


def test_faults_are_detected() -> None:
    """One wrong key among many is a fault."""
    call = make(core.isas()[0], 1, 2, 2, 33, 101, 16, 8, mask=M.Causal())
    wrong = call._replace(options={"mask": M.Window(99, 0)})
    wrong_out = wrong.run()

    class Wrong(Call):
        def run(self, **changes: Any) -> Any:
            return wrong_out

    assert faults(Wrong(*call))
    assert not faults(call)
