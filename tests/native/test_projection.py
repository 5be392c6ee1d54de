"""The kernel of linear layers with few rows, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard._backends.native.projection import can_project, project
from support import HAVE_CORE

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

# Largest error, divided by the sum of the absolute products. In 16 bits it is the rounding of the output.
TOLERANCE = {torch.float64: 1e-15, torch.float32: 5e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out, expected = project(x, weight, bias), exact(x, weight, bias)
    products = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    assert out.dtype is x.dtype
    tiny = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps  # subnormal numbers
    assert bool(((out.double() - expected).abs() <= TOLERANCE[x.dtype] * products + tiny).all())


@each_dtype
@pytest.mark.parametrize("depth", [1, 3, 17, 31, 32, 64, 65, 97, 1025, 5000])
def test_results_match_float64(isa: str, dtype: torch.dtype, depth: int) -> None:
    for width, rows in [(1, 1), (3, 2), (16, 3), (17, 4), (65, 5), (97, 7), (129, 32)]:
        x, weight, bias = (torch.randn(s, dtype=dtype) for s in ((rows, depth), (width, depth), (width,)))
        check(x, weight, bias)
        check(x, weight, None)


@each_dtype
def test_strides_and_misaligned_rows(isa: str, dtype: torch.dtype) -> None:
    storage = torch.randn(8 * 67 + 1, dtype=dtype)
    weight = torch.randn(41 * 70 + 3, dtype=dtype)[3:].view(41, 70)[:, :65]
    bias = torch.randn(42, dtype=dtype)[1:]
    rows = storage[1:].view(8, 67)[:, 1:66]
    columns = torch.randn(65, 6, dtype=dtype).T
    for x in (rows, rows[::2], rows[:1].expand(5, 65), columns, storage[:130:2][None]):
        check(x, weight, bias)


@each_dtype
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    isa: str, dtype: torch.dtype
) -> None:
    x, weight, bias = (torch.randn(s, dtype=dtype) for s in ((32, 1100), (515, 1100), (515,)))
    torch.set_num_threads(1)
    expected = project(x, weight, bias)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for n in (1, 2, 3, 4, 5, 7, 16, 32):
            assert torch.equal(project(x[32 - n :], weight, bias), expected[32 - n :])
    assert torch.equal(project(x, weight[100:117], None), project(x, weight, None)[:, 100:117])


@each_dtype
def test_nonfinite_values(isa: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 70, dtype=dtype), torch.randn(20, 70, dtype=dtype)
    x[0, 69], x[1, 0], weight[5, 3], weight[18, 68] = torch.nan, torch.inf, torch.inf, -torch.inf
    out, expected = project(x, weight, None), torch.nn.functional.linear(x, weight)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out[out.isinf()], expected[expected.isinf()])


def test_nan_beyond_the_edges_is_not_read(isa: str) -> None:
    x, weight = torch.full((4, 80), torch.nan), torch.full((40, 80), torch.nan)
    x[:3, :67], weight[:33, :67] = torch.randn(3, 67), torch.randn(33, 67)
    check(x[:3, :67], weight[:33, :67], None)


def test_long_sums_stay_precise(isa: str) -> None:
    """The error grows much more slowly than the depth."""
    x, weight = torch.rand(2, 40_000), torch.rand(16, 40_000)
    expected = exact(x, weight, None)
    assert float(((project(x, weight, None) - expected) / expected).abs().max()) < 2e-6


def test_out_of_range_sums_are_infinite(isa: str) -> None:
    x = torch.full((2, 64), 300.0, dtype=torch.float16)
    assert project(x, x, None).isinf().all()


@pytest.mark.usefixtures("poison")
def test_every_element_is_written(isa: str) -> None:
    assert project(torch.randn(5, 33), torch.randn(70, 33), None).isfinite().all()


def test_calls_that_the_core_does_not_take() -> None:
    x, weight, bias = torch.randn(2, 6), torch.randn(4, 6), torch.randn(4)
    assert can_project(x, weight, bias)
    assert can_project(x.expand(3, 2, 6), weight, None)
    refused = [
        (torch.randn(33, 6), weight, None), (x[:0], weight, None), (x[:, :5], weight, None),
        (x, weight[:0], None), (x, torch.randn(6, 4).T, None), (x.bfloat16(), weight, None),
        (x, weight, bias[:1]), (x, weight, bias.double()), (x.to("meta"), weight, None),
        (x.int(), weight.int(), None), (x, weight.to_sparse(), None), (torch.tensor(1.0), weight, None),
    ]  # fmt: skip
    assert not any(can_project(*arguments) for arguments in refused)
