"""Runs the experiments of docs/why at small sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from support import ROOT

WHY = ROOT / "docs" / "why"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    """Returns a function that imports an experiment by name.

    Restores `sys.path` and `sys.modules` afterwards, because other modules have the same names.
    """
    path = list(sys.path)
    sys.path.insert(0, str(WHY))
    yield import_module
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or ROOT).parent == WHY:
            del sys.modules[name]


def test_scale(load: Callable[[str], Any]) -> None:
    rows = load("scale").measure()
    assert rows[1024]["plain"].largest > 0.99
    assert rows[1024]["plain"].slope < 0.01
    for row in rows.values():
        assert row["scaled"].largest < 0.15
        assert row["scaled"].slope > 0.1


def test_slopes_match_the_softmax_jacobian(load: Callable[[str], Any]) -> None:
    scores = torch.randn(7, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(0), scores)
    torch.testing.assert_close(load("scale").slopes(scores.softmax(0)), jacobian.norm())


def test_softmax(load: Callable[[str], Any]) -> None:
    shares = load("softmax").measure()
    assert all(row["softmax"] > 0.99 for row in shares.values())
    assert shares[8]["the scores alone"] > 0.99
    assert 0.1 < shares[256]["the scores alone"] < 0.3


def test_qkv(load: Callable[[str], Any]) -> None:
    accuracies = load("qkv").measure()
    assert accuracies["separate"] == {"next token": 1, "capital": 1}
    assert accuracies["tied"]["next token"] < 1
    assert accuracies["tied"]["capital"] < 0.5


@pytest.mark.parametrize(("heads", "lower", "upper"), [(1, 0.0, 0.2), (4, 0.9, 1.0)])
def test_heads(load: Callable[[str], Any], heads: int, lower: float, upper: float) -> None:
    experiment = load("heads")
    tokens = torch.arange(10)[None]
    assert experiment.before(tokens)[0, 0].tolist() == [3, 2, 1, 0]
    assert lower <= experiment.named(experiment.train(heads, steps=300)) <= upper


def test_sequences(load: Callable[[str], Any]) -> None:
    results = load("sequences").measure(n=64)
    assert results["recurrence"]["far / near"] < 1e-10
    assert results["convolution"] == {"far / near": 0, "reach": 4 * 2}
    assert results["attention"]["far / near"] > 0.05
    assert results["attention"]["reach"] == 63
    work = load("sequences").multiplications(1024, 512)
    assert work["attention"] == 2 * 4 * 1024 * 512**2  # projections: half of the work if n = 2 d


def test_fixed_weights(load: Callable[[str], Any]) -> None:
    experiment = load("fixed_weights")
    rows = experiment.measure()
    fixed, attention, guess = rows["fixed weights"], rows["attention"], rows["most frequent symbol"]
    assert fixed["by position"] > 0.97
    assert attention["by position"] > 0.97
    assert attention["by content"] > 0.97
    assert abs(fixed["by content"] - guess["by content"]) < 0.03
    assert 0.25 < guess["by content"] < 0.35
    assert fixed["by content, 2 n tokens"] is None
    assert attention["by content, 2 n tokens"] > 0.97


def test_parameters_of_fixed_weights(load: Callable[[str], Any]) -> None:
    experiment = load("fixed_weights")
    layer, attention = experiment.FixedWeights(7), experiment.MIXERS["attention"]()
    assert layer.scores.numel() == experiment.parameters(7)["fixed weights"]
    assert attention.qkv.weight.numel() == experiment.parameters(7, experiment.WIDTH)["attention"]
    counts = [experiment.parameters(n) for n in (128, 1024, 8192)]
    assert [row["fixed weights"] for row in counts] == [16_384, 1_048_576, 67_108_864]
    assert {row["attention"] for row in counts} == {786_432}


def test_tasks_of_fixed_weights(load: Callable[[str], Any]) -> None:
    sample = load("fixed_weights").sample
    for task in ("by position", "by content"):
        tokens, targets = sample(task, 5, 12)
        names, symbols, wanted = tokens.unbind(-1)
        for row in range(5):
            assert names[row].unique().numel() == 12
            at = [names[row].tolist().index(name) for name in wanted[row].tolist()]
            source = [0, *range(11)] if task == "by position" else at
            assert targets[row].tolist() == symbols[row, source].tolist()
