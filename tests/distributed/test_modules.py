"""Modules with the argument `parallel` against the same modules in a single process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import distributed as D, masks as M, packing
from support import HAVE_CORE
from support.distributed_modules import (
    WIDTH,
    ModuleCase,
    error,
    joined,
    layout_error,
    nested_error,
    on_rank,
    single,
)  # fmt: skip
from support.ranks import Ranks

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

L, LK = 101, 67


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def check(ranks: Ranks, shape: Any, case: ModuleCase) -> None:
    """Checks outputs and gradients: errors relative to the largest element."""
    for got, expected in zip(joined(case, ranks.run(shape, on_rank, case)), single(case), strict=True):
        scale = max(float(expected.abs().max()), 1.0)
        torch.testing.assert_close(got / scale, expected / scale, rtol=0, atol=2e-5)


def padded(n: int = L) -> Tensor:
    """Returns tokens (2, n, WIDTH) with NaN in the padding of the second sample."""
    x = tokens(2, n, WIDTH)
    x[1, 40:] = torch.nan
    return x


LENGTHS = torch.tensor([L, 40])
POSITIONS = torch.stack([torch.arange(L), torch.arange(L).flip(0)])
CU = packing.cu_seqlens([30, 0, 50, 21])
SELF: dict[str, tuple[str, Tensor, dict[str, Any]]] = {
    "grouped queries": ("grouped", tokens(2, L, WIDTH), {}),
    "lengths": ("grouped", padded(), {"lengths": LENGTHS}),
    "first position": ("grouped", tokens(2, L, WIDTH), {"positions": 40}),
    "positions": ("grouped", tokens(2, L, WIDTH), {"positions": POSITIONS}),
    "ranks without tokens": ("stack", tokens(1, 3, WIDTH), {"mask": M.sliding(2)}),
    "unbatched": ("grouped", tokens(L, WIDTH), {}),
    "packed": ("grouped", tokens(L, WIDTH), {"cu_seqlens": CU}),
    "packed distances": ("relative", tokens(L, WIDTH), {"cu_seqlens": CU}),
    "alibi": ("alibi", tokens(2, L, WIDTH), {}),
    "relative": ("relative", tokens(2, L, WIDTH), {}),
    "mask of padding": ("plain", padded(), {"mask": M.Lengths(LENGTHS)}),
    "tensor": ("plain", tokens(2, L, WIDTH), {"mask": tokens(2, L, L) > 0}),
    "latent": ("latent", padded(), {"lengths": LENGTHS}),
    "latent absorbed": ("latent", tokens(2, L, WIDTH), {"positions": POSITIONS, "absorb": True}),
    "latent expanded": ("latent", tokens(L, WIDTH), {"cu_seqlens": CU, "absorb": False}),
    "linear": ("linear", padded(), {"lengths": LENGTHS}),
    "linear unbatched": ("linear", tokens(L, WIDTH), {}),
    "linear encoder": ("linear encoder", padded(), {"lengths": LENGTHS}),
    "delta": ("delta", padded(), {"lengths": LENGTHS}),
    "stack": ("stack", padded(), {"lengths": LENGTHS}),
    "packed stack": ("stack", tokens(L, WIDTH), {"cu_seqlens": CU}),
    "post-norm": ("post-norm", padded(), {"mask": M.Lengths(LENGTHS)}),
}  # fmt: skip


@pytest.mark.parametrize("name", SELF)
def test_self_attention(ranks: Ranks, name: str) -> None:
    module, x, options = SELF[name]
    L = x.shape[-2]
    layouts = (2, D.zigzag(L, 2), "ring"), (3, D.striped(L, 3, 9), "gather"), (4, D.contiguous(L, 4), "auto")
    for n, layout, method in layouts:
        check(ranks, n, ModuleCase(module, (x,), layout, method, options))
    check(ranks, (2, 2), ModuleCase(module, (x,), D.zigzag(L, 4), "usp", options))


X, CONTEXT, VALUE = tokens(2, L, WIDTH), tokens(2, LK, 10), tokens(2, LK, 7)
CU_K = packing.cu_seqlens([10, 8, 40, 9])
CROSS: dict[str, tuple[str, tuple[Tensor, ...], dict[str, Any]]] = {
    "values": ("cross", (X, CONTEXT, VALUE), {"mask": M.Prefix(50)}),
    "packed": (
        "plain", (X[0], tokens(LK, WIDTH)), {"cu_seqlens": CU, "context_cu_seqlens": CU_K}
    ),
    "padded context": ("plain", (X, padded(LK)), {"mask": M.Lengths([LK, 40])}),
    "decoder": ("decoder", (X, tokens(2, LK, WIDTH)), {"context_mask": M.Lengths([LK, 40])}),
    "remembering": ("remembering", (X, tokens(2, LK, WIDTH)), {}),
    "encoder-decoder": (
        "encoder-decoder", (tokens(2, LK, WIDTH), X), {"source_mask": M.Lengths([LK, 40])}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_with_two_layouts(ranks: Ranks, name: str) -> None:
    module, inputs, options = CROSS[name]
    pairs = (2, (D.zigzag(L, 2), D.contiguous(LK, 2))), (4, (D.contiguous(L, 4), D.striped(LK, 4, 8)))
    for (n, layout), method in zip(pairs, ("ring", "gather"), strict=True):
        check(ranks, n, ModuleCase(module, inputs, layout, method, options))


# Errors


ERRORS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], str]] = {
    "cache": ("plain", (1, 10), {"cache": object()}, "cache: expected None with parallel, got object"),
    "caches": ("stack", (1, 10), {"caches": [object(), object()]}, "cache: expected None with parallel"),
    "weights": ("plain", (1, 10), {"return_weights": True}, "parallel: expected None with return_weights"),
    "type": ("plain", (1, 10), {"parallel": 2}, "parallel: expected a distributed.SequenceParallel, got int"),
    "residual": ("stack", (1, 10), {"parallel": 2}, "parallel: expected a distributed.SequenceParallel"),
    "length": ("stack", (1, 20), {}, "x: expected 10 tokens, the shard of rank 0 of 20 tokens with parallel"),
    "context": ("plain", (1, 10), {"context": torch.zeros(1, 9, WIDTH)}, "context: expected 10 tokens, the"),
    "positions": ("grouped", (1, 10), {"positions": torch.arange(10)}, "of the whole sequence with parallel"),
    "cu_seqlens": ("plain", (10,), {"cu_seqlens": torch.tensor([0, 10])}, "expected the last entry 20, the"),
    "mask": (
        "plain", (10,), {"cu_seqlens": torch.tensor([0, 20]), "mask": M.Prefix(3)},
        "cu_seqlens: expected, with parallel, a mask and a bias that depend on distances alone",
    ),
    "longformer": ("longformer", (1, 10), {}, "unexpected keyword argument 'parallel'"),
    "additive": ("additive", (1, 10), {}, "unexpected keyword argument 'parallel'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_both_arguments(ranks: Ranks, name: str) -> None:
    module, shape, options, message = ERRORS[name]
    assert message in ranks.run(2, error, module, (*shape, WIDTH), options)[0]


def test_nested_tensors_raise(ranks: Ranks) -> None:
    assert "parallel: expected None with nested tensors" in ranks.run(2, nested_error)[0]


def test_a_layout_of_other_ranks_raises(ranks: Ranks) -> None:
    assert "layout: expected 2 ranks as in the mesh, got 3" in ranks.run(2, layout_error)[0]


def test_without_the_argument_nothing_distributed_is_imported() -> None:
    loaded = "import sys, regard.nn; sys.exit('regard.distributed' in sys.modules)"
    subprocess.run([sys.executable, "-c", loaded], check=True)
