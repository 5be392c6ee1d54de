"""Experiments on code samples of the notes: their numbers, and verdicts that could be others."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from regard import convert
from support.claims import experiment, measure

pytestmark = pytest.mark.usefixtures("one_thread")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.parametrize("d", [32, pytest.param(512, marks=pytest.mark.full)])
def test_recommender(d: int) -> None:
    numbers = measure("recommender", d=d).numbers
    assert numbers["change by other users, printed"] > 0.1
    assert numbers["change by own earlier items, printed"] == 0
    assert numbers["change by other users, batch_first"] < 1e-5
    assert numbers["change by own earlier items, batch_first"] > 0.1


@pytest.mark.parametrize("d", [32, pytest.param(512, marks=pytest.mark.full)])
def test_time_series(d: int) -> None:
    numbers = measure("time_series", d=d).numbers
    assert numbers["change by other series, printed"] > 0.1
    assert numbers["change by own past, printed"] == 0
    assert numbers["change by other series, batch_first"] < 1e-5
    assert numbers["change by own past, batch_first"] > 0.1
    assert numbers["change by order of own past, batch_first"] < 1e-5


@pytest.mark.parametrize(("name", "verdict"), [("recommender", "right"), ("time_series", "incomplete")])
def test_mended_samples_have_other_verdicts(monkeypatch: pytest.MonkeyPatch, name: str, verdict: str) -> None:
    module = experiment(name)
    influences = module.influences
    monkeypatch.setattr(module, "influences", lambda d, heads, batch_first: influences(d, heads, True))
    assert module.measure(d=32).verdict == verdict


def test_verify_finds_both_samples() -> None:
    items, series = torch.arange(18).view(2, 9), torch.randn(2, 9, 3)
    for batch_first in (True, False):
        models = (
            (experiment("recommender").Recommender(16, 2, batch_first), items),
            (experiment("time_series").Forecaster(3, 16, 2, batch_first), series),
        )
        for model, inputs in models:
            if batch_first:
                convert.verify(model, inputs)
            else:
                with pytest.warns(UserWarning, match="the model mixes samples"):
                    convert.verify(model, inputs)


def test_policy_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = measure("policy_heads").numbers
    assert not numbers["environments that work"]["CartPole"]
    assert numbers["numbers of state variables that work, up to 32"] == [8, 16, 24, 32]
    assert numbers["shape of the logits with a projection, CartPole"] == [2]
    module = experiment("policy_heads")
    monkeypatch.setattr(module, "HEADS", 1)
    assert module.measure().verdict == "right"


@needs_transformers
def test_clip_similarity(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = measure("clip_similarity").numbers
    assert numbers["the correct formula beside the model"] < 1e-5
    assert numbers["largest difference of the probabilities"] > 0.1
    assert numbers["change by doubled features, printed"] > 0.1
    assert numbers["change by doubled features, CLIP"] < 1e-6
    module = experiment("clip_similarity")
    units = torch.nn.functional.normalize(torch.randn(2, 8, 16), dim=-1)
    monkeypatch.setattr(module, "features", lambda steps: (*units, 1.0, torch.zeros(8, 8)))
    assert module.measure().verdict == "right"  # features of length 1, and a scale of 1


def test_mask_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = measure("mask_comment").numbers
    assert numbers["weight where the mask is not 0, code"] == pytest.approx(1)
    assert numbers["weight where the mask is 0, code"] == 0
    assert numbers["weight where the mask is 0, by the comment"] > 0.5
    assert numbers["code beside regard.weights"] < 1e-12
    module = experiment("mask_comment")
    masses = module.masses
    monkeypatch.setattr(module, "masses", lambda scores, mask, filled: masses(scores, mask, ~filled))
    assert module.measure().verdict == "incomplete"  # code that follows the comment fills the last row
