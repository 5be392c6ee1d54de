"""`regard compare`: costs and losses of models that differ only in their attention."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard import cost
from regard_gallery import compare
from regard_gallery.compare import NOTES, Effort, Measured, Row, Sizes, denied, undecided
from regard_gallery.compare._text import source_code
from regard_gallery.compare._training import _share
from support import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Sizes(32, heads=4, layers=2, window=8)
BRIEF = Effort(steps=1, seeds=2, length=16, batch=2, tokens=40, rounds=1)


@pytest.fixture(scope="module")
def progress() -> list[str]:
    return []


@pytest.fixture(scope="module")
def measured(progress: list[str]) -> Measured:
    return compare.measure(SMALL, BRIEF, progress=progress.append)


def test_every_kind_has_a_row(measured: Measured, progress: list[str]) -> None:
    assert [row.kind for row in measured.rows] == list(compare.KINDS)
    assert len(progress) == BRIEF.ticks
    for row in measured.rows:
        assert min(row.prefill, row.decode) > 0
        assert len(row.losses) == 2
        assert all(2 < loss < 8 for loss in row.losses)  # equal probabilities give log 256 = 5.5


def test_parameters_and_bytes_are_those_of_the_cost_model(measured: Measured) -> None:
    for row in measured.rows:
        layer = cost.from_module(compare.layer(row.kind, SMALL))
        assert row.attention_parameters == cost.estimate(layer, 1).parameters, row.kind
        if row.kind in ("MHA", "GQA-4", "MQA", "MLA"):
            assert row.token_bytes == SMALL.layers * cost.cache_bytes(layer, 1, format="float32"), row.kind
            assert row.cache_bytes == BRIEF.tokens * row.token_bytes


def test_caches_of_windows_and_states_do_not_grow() -> None:
    for kind in ("window", "linear"):
        model = compare.ByteModel(kind, SMALL)
        assert model.cache_bytes(10_000) == model.cache_bytes(10)
    D = SMALL.width // SMALL.heads
    assert compare.ByteModel("linear", SMALL).cache_bytes(1) == 2 * SMALL.heads * D * (D + 1) * 4
    assert compare.ByteModel("window", SMALL).cache_bytes(1) == 2 * 2 * SMALL.width * (8 + 16) * 4


@pytest.mark.parametrize("kind", compare.KINDS)
def test_decoding_equals_one_call(kind: str) -> None:
    torch.manual_seed(0)
    prompt, tokens = torch.randint(256, (1, 30)).split((25, 5), 1)
    with torch.no_grad():
        side = compare.Side(kind, SMALL, prompt, 5)
        side.check(tokens)
        side.check(tokens)  # the first check must leave the caches unchanged
        assert all(len(cache) == 25 for cache in side.caches)
        side.model.score.weight.data[0] = torch.nan
        with pytest.raises(ArithmeticError, match=f"{kind}: decoding is nan away"):
            side.check(tokens)


@pytest.mark.parametrize("kind", compare.KINDS)
def test_a_seed_repeats_and_training_helps(kind: str) -> None:
    losses = [
        compare.trained(kind, SMALL, seed, steps, length=32, batch=4)
        for seed, steps in ((0, 1), (0, 12), (0, 12), (1, 12))
    ]
    assert losses[1] == losses[2]
    assert losses[1] != losses[3]
    assert losses[1] < losses[0] - 0.5


def test_held_out_text_is_not_trained_on() -> None:
    train, held_out = source_code(101)
    assert train.shape[1] == held_out.shape[1] == 101
    assert len(train) // len(held_out) in (9, 10)
    assert bytes(train[0].tolist()) not in bytes(held_out.flatten().tolist())
    with pytest.raises(ValueError, match=r"length: expected \d+ bytes or fewer, got 10000000"):
        source_code(10_000_000)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [_share(step, 100) for step in range(101)]
    assert max(rates) == 1 == rates[9]
    assert rates[0] == 0.1
    assert rates[100] == 0
    assert _share(0, 1) == 1


def row(kind: str, size: int, loss: float, spread: float = 0.01) -> Row:
    return Row(kind, size, size, size, size, 1 / size, 1 / size, (loss - spread, loss, loss + spread))


def test_denied_names_the_orders_that_do_not_hold() -> None:
    rows = (row("MHA", 30, 1.0), row("GQA-4", 20, 1.0), row("MQA", 10, 1.2), row("MLA", 9, 1.0))
    right = Measured(SMALL, BRIEF, 1, rows)
    assert right.denied() == {name: [] for name in NOTES}
    same = replace(right, rows=(*rows[:2], row("MQA", 10, 1.005), rows[3]))
    assert same.denied()["quality"] == []
    assert same.undecided()["quality"] == ["MQA < MHA", "MQA < GQA-4", "MQA < MLA"]
    assert right.undecided() == {name: [] for name in NOTES}
    good = replace(right, rows=(*rows[:2], row("MQA", 10, 0.9), rows[3]))
    assert good.denied()["quality"] == ["MQA < MHA", "MQA < GQA-4", "MQA < MLA"]
    slow = replace(right, rows=(*rows[:3], row("MLA", 29, 1.0)))
    assert slow.denied()["inference"] == ["GQA-4 < MLA"]
    assert slow.undecided()["inference"] == ["MHA < MLA"]  # 3 % apart
    assert slow.denied()["parameters"] == ["MLA < GQA-4"]
    assert slow.denied()["memory"] == ["MLA < GQA-4", "MLA < MQA"]


def test_orders_within_the_margin_are_undecided() -> None:
    values = {"MHA": 3.0, "GQA-4": 2.0, "MQA": 1.9, "MLA": 1.0}
    assert denied(NOTES["memory"], values) == []
    assert denied(NOTES["memory"], values, 0.2) == []
    assert undecided(NOTES["memory"], values, 0.2) == ["MQA < GQA-4"]
    assert undecided(NOTES["memory"], values) == []
    assert denied(NOTES["quality"], values) == ["MQA < MLA"]
    equal = dict.fromkeys(values, 1.0)
    assert len(denied(NOTES["memory"], equal)) == 6
    assert len(undecided(NOTES["memory"], equal, 0.1)) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sizes(64, heads=6), "heads: expected a multiple of the 4 key heads of GQA-4, got 6"),
        (lambda: Sizes(48, heads=8), "width: expected a multiple of 4 for each of 8 heads, got 48"),
        (lambda: Sizes(64, layers=0), "layers: expected an integer from 1"),
        (lambda: Effort(seeds=1), "seeds: expected an integer from 2"),
        (lambda: compare.layer("RNN", SMALL), "kind: expected one of MHA, GQA-4, .*, got 'RNN'"),
    ],
)
def test_wrong_sizes_raise(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_json_and_picture(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = json.loads(measured.to_json())
    assert data["rows"][3]["kind"] == "MLA"
    assert tuple(data["rows"][3]["losses"]) == measured["MLA"].losses
    assert data["sizes"]["width"] == 32
    assert data["not as in the notes"] == measured.denied()
    assert data["undecided"] == measured.undecided()
    figure = measured.plot(str(tmp_path / "bars.png"))
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    lengths = [bar.get_width() for bar in figure.axes[1].patches]
    assert lengths == [row.token_bytes for row in measured.rows]


def test_the_command(measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from regard.cli._app import app

    calls: list[object] = []

    def measure(sizes: Sizes, effort: Effort, progress: object) -> Measured:
        calls.extend((sizes, effort))
        return measured

    monkeypatch.setattr(compare, "measure", measure)
    numbers, picture = tmp_path / "numbers.json", tmp_path / "bars.png"
    options = ["--quick", "--steps", "7", "--width", "64", "--json", str(numbers), "--plot", str(picture)]
    result = CliRunner().invoke(app, ["compare", *options], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    sizes, effort = compare.QUICK
    assert calls == [replace(sizes, width=64), replace(effort, steps=7)]
    loss = measured["MLA"].loss
    assert f"| {measured['MHA'].loss:.3f} ± " in result.output
    assert f"| very low: {measured['MLA'].token_bytes / measured['MHA'].token_bytes:.2f} " in result.output
    assert f"| high: {loss:.3f} " in result.output
    assert json.loads(numbers.read_text(encoding="utf-8"))["threads"] == 1
    assert picture.exists()


def test_the_command_checks_its_paths_before_measuring() -> None:
    pytest.importorskip("rich")
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from regard.cli._app import app

    result = CliRunner().invoke(app, ["compare", "--json", "no/such/place.json"])
    assert result.exit_code == 1
    assert "--json: expected a file in a directory that exists, got no/such/place.json" in result.output


def test_the_page_shows_the_sizes_of_the_quick_models() -> None:
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    sizes, effort = compare.QUICK
    for kind in compare.KINDS:
        model, layer = compare.ByteModel(kind, sizes), compare.layer(kind, sizes)
        counts = (compare.parameters(layer), compare.parameters(model))
        token_bytes = model.cache_bytes(effort.tokens) / effort.tokens
        assert f"| {kind} | {counts[0]:,} | {counts[1]:,} | {token_bytes:,g} |" in page


def test_means_and_spread() -> None:
    assert row("MHA", 1, 2.0, 0.1).loss == pytest.approx(2)
    assert math.isclose(row("MHA", 1, 2.0, 0.1).spread, 0.1)
