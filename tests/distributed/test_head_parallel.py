"""Tensor parallelism: a layer divided among ranks equals the layer of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import HAVE_CORE, head_parallel as H
from support.ranks import Ranks

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", H.CASES)
def test_outputs_and_gradients(ranks: Ranks, name: str, n: int) -> None:
    expected = H.single(name)
    for rank, (results, divisions) in enumerate(ranks.run(n, H.on_rank, name)):
        assert_same(results.output, expected.output)
        assert_same(results.inputs, expected.inputs)
        assert results.parameters.keys() == expected.parameters.keys()
        for parameter, grad in expected.parameters.items():
            own = divisions[parameter].local(grad, rank) if parameter in divisions else grad
            assert_same(results.parameters[parameter], own)


def test_training_on_1_2_and_4_ranks(ranks: Ranks) -> None:
    """Losses, norms of gradients and final states are those of a single process."""
    expected = H.train(None, 10)
    assert expected.losses[-1] < expected.losses[0]
    for n in (1, 2, 4):
        for training in ranks.run(n, H.train, 10):
            torch.testing.assert_close(training.losses, expected.losses, rtol=1e-4, atol=0)
            torch.testing.assert_close(training.norms, expected.norms, rtol=1e-4, atol=0)
            assert training.replicas_equal
            torch.testing.assert_close(dict(training.model), dict(expected.model), rtol=1e-4, atol=1e-4)


def test_training_continues_on_another_number_of_ranks(ranks: Ranks) -> None:
    two = ranks.run(2, H.train, 4)[0]
    expected = ranks.run(2, H.train, 3, two)[0].losses
    for n in (1, 4):
        torch.testing.assert_close(ranks.run(n, H.train, 3, two)[0].losses, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(H.train(None, 3, two).losses, expected, rtol=1e-5, atol=0)


def test_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint of 2 ranks holds the whole model, which 1 and 4 ranks load."""
    expected = dict(H.stack().state_dict())
    ranks.run(2, H.saved, str(tmp_path))
    for n in (1, 4):
        for state in ranks.run(n, H.loaded, str(tmp_path)):
            torch.testing.assert_close(dict(state), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_generation(ranks: Ranks, kind: str) -> None:
    expected = H.generated(None, kind)
    for n in (2, 4):
        for out in ranks.run(n, H.generated, kind):
            assert_same(out, expected)


@pytest.mark.parametrize("function", [H.by_memory, H.with_nested, H.variants, H.by_styles, H.from_meta])
def test_forms_of_use(ranks: Ranks, function: Any) -> None:
    expected = function(None)
    for n in (2, 4):
        for results in ranks.run(n, function):
            assert_same(results, expected)


def test_weights_are_those_of_the_rank(ranks: Ranks) -> None:
    assert_same(torch.cat(ranks.run(4, H.weights), 1), H.weights(None))


@pytest.mark.parametrize(
    "name", ["grouped", "gate and sink", "dropout", "alibi", "per head", "packed dropout"]
)
def test_with_sequence_parallel(ranks: Ranks, name: str) -> None:
    """Tokens are divided in one dim of a mesh, heads in the other."""
    expected = H.with_sequence_parallel(None, name)
    for results in ranks.run((2, 2), H.with_sequence_parallel, name):
        assert_same(results, expected)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("heads", 4, "mesh: expected at most Hq = 3 ranks with Hkv = 1 key heads, so that each rank has a"),
        ("no output", 2, "module: expected Attention with nn.Linear as out, got Identity"),
        ("module", 2, "module: expected Attention, LatentAttention, FeedForward, GatedFeedForward, or a"),
        ("twice", 2, "module: expected a layer without HeadParallel, got Attention that already has it"),
        ("mesh", (2, 2), "mesh: expected 1 dim(s), got 2"),
        ("mask", 2, "mask: expected a mask of 1 or Hq = 6 heads, got 3"),
        ("seed", 2, "dropout: expected PyTorch's generators in one state on all ranks"),
        ("state", 2, "qkv.weight: expected the whole (40, 24), got (20, 24)"),
        ("optimizer", 2, "optimizer: expected states of the parameter's shape (20, 24), or numbers, got"),
    ],
)
def test_errors(ranks: Ranks, kind: str, shape: Any, message: str) -> None:
    for error in ranks.run(shape, H.fails, kind):
        assert message in error
