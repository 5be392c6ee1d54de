"""Sequence parallelism with DDP, FSDP2, activation checkpointing and distributed checkpoints.

Losses, gradients and weights are compared with those of a single process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import HAVE_CORE
from support.distributed_training import WAYS, Result, alone, resume, save, sharded_projections, together
from support.ranks import Ranks

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")

STEPS = 3


@pytest.fixture(scope="module")
def expected() -> Result:
    return alone(STEPS)


def check(got: Result, expected: Result, first: int = 0) -> None:
    torch.testing.assert_close(got.losses, expected.losses[first:], rtol=1e-5, atol=0)
    for a, b in zip(got.grads + got.weights, expected.grads + expected.weights, strict=True):
        scale = float(b.abs().max())
        torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=2e-5)


BFLOAT16 = ("fully_shard in bfloat16", "autocast")
TWO_DIMS = [way for way in WAYS if way not in (*BFLOAT16, "compiled")]
CASES = [(way, (2, 2)) for way in TWO_DIMS] + [("plain", 3), ("checkpoint", 3), ("ddp", 3), ("compiled", 2)]


@pytest.mark.parametrize(("way", "shape"), CASES)
def test_same_training_as_a_single_process(ranks: Ranks, expected: Result, way: str, shape: Any) -> None:
    for got in ranks.run(shape, together, way, STEPS):
        check(got, expected)


@pytest.mark.parametrize("way", BFLOAT16)
def test_mixed_precision(ranks: Ranks, expected: Result, way: str) -> None:
    """The losses of bfloat16 weights and activations. Gradients would differ by their rounding."""
    for got in ranks.run(2, together, way, STEPS):
        torch.testing.assert_close(got.losses, expected.losses, rtol=5e-3, atol=0)
        assert got.losses != expected.losses


def test_projections_are_sharded_with_their_layer(ranks: Ranks) -> None:
    """Cross-attention uses rows of the packed weight, which it must see whole."""
    for layer, self_attention, cross_attention in ranks.run(2, sharded_projections):
        assert layer < 1e-6
        assert self_attention < 1e-6
        assert "mixed torch.Tensor and DTensor" in cross_attention


def test_checkpoint_of_four_ranks_loads_on_two(ranks: Ranks, expected: Result, tmp_path: Path) -> None:
    ranks.run(4, save, tmp_path, STEPS - 1)
    for got in ranks.run(2, resume, tmp_path, range(STEPS - 1, STEPS)):
        check(got, expected, STEPS - 1)
