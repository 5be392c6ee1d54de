"""Experiments on formulas of the notes: their numbers, and verdicts that could be others."""

from __future__ import annotations

import pytest
import torch

from support.claims import experiment, measure

pytestmark = pytest.mark.usefixtures("one_thread")


def test_sum_index() -> None:
    numbers = measure("sum_index").numbers
    assert numbers["relative error, sum over i of alpha_ij V_j"] > 1
    assert numbers["relative error, the same, alpha_ij of query j and key i"] > 1
    assert numbers["relative error, sum over j of alpha_ij V_j"] < 1e-12
    assert measure("sum_index", n=7, d=5)
    assert experiment("sum_index").measure(n=1).verdict == "right"  # one token has no other index


def test_normaliser() -> None:
    numbers = measure("normaliser").numbers
    short, long = numbers["relative error, printed"]
    assert 100 < short < long / 1.8  # grows with the length
    assert max(numbers["relative error, normalised"]) < 0.1
    assert experiment("normaliser").measure(n=2).verdict == "incomplete"
    assert experiment("normaliser").measure(features=1, d=64).verdict == "wrong"  # an estimate too rough


def test_head_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = measure("head_sum").numbers
    assert numbers["relative difference from the sum of head_i W_i^O"] < 1e-12
    assert numbers["relative distance from linear in the tokens"] > 0.5
    module = experiment("head_sum")

    class Bent(module.Attention):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(super().forward(x))

    monkeypatch.setattr(module, "Attention", Bent)
    assert module.measure().verdict == "right"  # a layer with a non-linear f


def test_weighted_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = measure("weighted_mean", n=32, steps=500).numbers
    nats = numbers["nats from random weights, by d_k"]
    assert nats["8"] > 0.05 > 0.01 > nats["32"]
    assert nats["8"] < numbers["nats of equal weights"]
    module = experiment("weighted_mean")
    monkeypatch.setattr(module, "WIDTHS", (32,))
    assert module.measure(n=32, steps=500).verdict == "right"


@pytest.mark.full
def test_weighted_mean_of_64_tokens() -> None:
    nats = measure("weighted_mean").numbers["nats from random weights, by d_k"]
    assert nats["8"] == pytest.approx(0.24, abs=0.02)
    assert nats["64"] < 1e-3
