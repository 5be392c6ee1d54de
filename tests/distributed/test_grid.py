"""Every mask of the algebra, over every method, layout, number of ranks and option.

Real processes run the grid: a pool of them computes 20 cases a second on two cores, so a simulation
of the ranks in one process would gain little.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

from regard import distributed as D, masks as M
from regard._call.spec import compute_dtype
from regard.scores import Alibi, RelativeBias
from support import HAVE_CORE
from support.distributed import Sharded, case, check
from support.ranks import Ranks
from support.strategies import Case, mask_strategy

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

METHODS = ("ring", "gather", "ulysses", "usp")
LAYOUTS = (
    D.contiguous, D.zigzag, lambda L, n: D.striped(L, n, 3), lambda L, n: D.balanced(M.Causal(), L, n)
)  # fmt: skip
# Of all results, and a factor for the gradients of biases and sinks.
TOLERANCES = {torch.float64: (1e-12, 1), torch.float32: (1e-5, 10), torch.bfloat16: (2e-2, 10)}
DTYPES = list(TOLERANCES)
PANEL = 32  # outputs of calls with more query rows are bitwise equal, except those of a ring


def shapes(method: str, heads: int) -> st.SearchStrategy[Any]:
    """Draws the number of ranks, or the two dims of a mesh, with a query head for each rank."""
    if method == "usp":
        return st.sampled_from([(2, 1)] if heads == 1 else [(1, 2), (2, 1), (2, 2)])
    return st.integers(1, min(4, heads) if method == "ulysses" else 4)


def biases(generated: Case, dtype: torch.dtype) -> st.SearchStrategy[Any]:
    g = torch.Generator().manual_seed(generated.Lq)
    heads, sizes = generated.heads, (generated.Lq, generated.Lk)
    return st.sampled_from(
        [
            None, Alibi(Alibi.standard(heads).slopes.to(dtype)),
            RelativeBias(torch.randn(32, heads, generator=g, dtype=dtype)),
            torch.randn(2, heads, *sizes, generator=g, dtype=dtype),
            torch.randn(1, 1, 1, sizes[1], generator=g, dtype=dtype),
        ]
    )  # fmt: skip


@st.composite
def calls(draw: st.DrawFn, method: str) -> tuple[Any, Sharded]:
    """Draws the shape of a mesh and a call."""
    generated = draw(mask_strategy(sizes=(1, 3, 7, 17, 36), batches=((2,),)))
    heads, layout, dtype = generated.heads, draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(DTYPES))
    shape = draw(shapes(method, heads))
    n = shape if isinstance(shape, int) else shape[0] * shape[1]
    key_heads = [x for x in (1, heads) if _divide(method, heads, x, shape)]
    sinks = torch.linspace(-1, 2, heads, dtype=compute_dtype(dtype))
    options = {
        "mask": generated.mask, "offset": generated.offset,
        "bias": draw(biases(generated, compute_dtype(dtype))), "sink": draw(st.sampled_from([None, sinks])),
        "softcap": draw(st.sampled_from([None, 2.0])), "scale": draw(st.sampled_from([None, 0.2])),
        "dropout": draw(st.sampled_from([0.0, 0.4])), "seed": 9, "dtype": dtype,
        "Hq": heads, "Hkv": draw(st.sampled_from(key_heads)), "Dv": draw(st.sampled_from([16, 24])),
        "part_bytes": draw(st.sampled_from([1, 2**20])),
    }  # fmt: skip
    return shape, case((layout(generated.Lq, n), layout(generated.Lk, n)), method, **options)


def _divide(method: str, heads: int, key_heads: int, shape: Any) -> bool:
    """Returns whether Ulysses can divide the heads."""
    ranks = {"ulysses": shape, "usp": shape[1] if isinstance(shape, tuple) else 1}.get(method, 1)
    return key_heads >= ranks or heads // key_heads >= -(-ranks // key_heads)


def check_call(ranks: Ranks, shape: Any, x: Sharded) -> None:
    """Compares outputs and all gradients with those of a single process."""
    got, expected = check(ranks, shape, x, *TOLERANCES[x.q.dtype])
    if x.method in ("gather", "ulysses") and x.q.shape[2] > PANEL:
        assert all(torch.equal(a, b) for a, b in zip(got[:2], expected[:2], strict=True))


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=50, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_equals_a_single_process(ranks: Ranks, method: str, data: st.DataObject) -> None:
    check_call(ranks, *data.draw(calls(method)))


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=1500, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_equals_a_single_process_in_many_calls(ranks: Ranks, method: str, data: st.DataObject) -> None:
    check_call(ranks, *data.draw(calls(method)))
