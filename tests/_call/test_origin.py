"""The origin of dropout: a part of a call draws the pattern of the whole call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard._autograd.attention import run
from regard._call.dropout import DropoutOrigin
from regard._call.make import make
from regard._call.spec import Options
from support import HAVE_CORE

NATIVE = pytest.param("native", marks=pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built"))
B, H, L, D = 2, 4, 150, 8


def kept(impl: str, rows: slice, keys: slice, heads: slice, extra: int = 0) -> Tensor:
    """Returns which weights of a part dropout keeps: values are unit vectors, scores are equal.

    The part also has `extra` channels in its values, which are zero.
    """
    n = keys.stop - keys.start
    q = torch.zeros(B, heads.stop - heads.start, rows.stop - rows.start, D)
    v = torch.cat([torch.eye(n), torch.zeros(n, extra)], 1).expand(B, q.shape[1], n, n + extra)
    problem = make(q, torch.zeros(B, q.shape[1], n, D), v, Options(dropout=0.5, seed=7))
    problem = problem._replace(origin=DropoutOrigin(heads.start, H, rows.start, keys.start))
    return run(problem, impl)[0][..., :n] != 0


@pytest.mark.parametrize("impl", [NATIVE, "reference"])
@pytest.mark.parametrize("rows", [slice(0, 150), slice(33, 150), slice(70, 75), slice(149, 150)])
@pytest.mark.parametrize("keys", [slice(0, 150), slice(31, 90), slice(8, 9)])
@pytest.mark.parametrize("heads", [slice(0, 4), slice(1, 3)])
def test_part_draws_the_pattern_of_the_whole(impl: str, rows: slice, keys: slice, heads: slice) -> None:
    whole = kept("reference", slice(0, L), slice(0, L), slice(0, H))
    assert 0.4 < whole.float().mean() < 0.6
    assert torch.equal(kept(impl, rows, keys, heads), whole[:, heads, rows, keys])


@pytest.mark.parametrize("impl", [NATIVE, "reference"])
@pytest.mark.parametrize("keys", [slice(31, 90), slice(8, 64)])
def test_gradient_has_the_pattern_of_forward(impl: str, keys: slice) -> None:
    """dv sums dout over the kept weights: with one query per call, it shows the pattern."""
    torch.manual_seed(0)
    n = keys.stop - keys.start
    q, k = torch.randn(B, H, 40, D), torch.randn(B, H, n, D)
    v = torch.eye(n).expand(B, H, n, n).clone().requires_grad_()
    problem = make(q, k, v, Options(dropout=0.5, seed=7))._replace(origin=DropoutOrigin(3, 9, 20, keys.start))
    out = run(problem, impl)[0]
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close(dv, out.detach().mT @ dout)


@pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
def test_operators_keep_the_origin() -> None:
    """A profiled call goes through an operator."""
    q, k, v = (torch.randn(1, 2, 40, D, requires_grad=True) for _ in range(3))
    problem = make(q, k, v, Options(dropout=0.5, seed=7))._replace(origin=DropoutOrigin(3, 9, 20, 5))
    plain, watched = (run(problem._replace(watched=w), "native")[0] for w in (False, True))
    assert torch.equal(plain, watched)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (plain, watched)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
