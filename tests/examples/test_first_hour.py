"""Tests of examples/first_hour.py: every task runs, and what a newcomer reads is there."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import nn, see
from regard.cache import KVCache
from support import ROOT
from support.scripts import load_script

for package in ("rich", "matplotlib", "transformers", "typer"):
    pytest.importorskip(package)

SCRIPT = ROOT / "examples" / "first_hour.py"


hour = load_script("examples/first_hour.py")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hour, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("number", range(1, 15))
def test_task(number: int) -> None:
    """A task raises if its result differs from its independent formula."""
    torch.manual_seed(number)
    assert hour.TASKS[number - 1].run().strip()


def test_there_are_fourteen_tasks() -> None:
    assert len(hour.TASKS) == len({title for title, _ in hour.TASKS}) == 14


def code_lines(function: ast.FunctionDef) -> int:
    """Counts the lines from `def` to the end, without the docstring."""
    first = function.body[0]
    doc = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) else 0  # type: ignore[operator]
    return function.end_lineno - function.lineno + 1 - doc  # type: ignore[operator]


def test_functions_have_at_most_ten_lines() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
    lengths = {function.name: code_lines(function) for function in functions}
    assert lengths.keys() >= {run.__name__ for _, run in hour.TASKS}
    assert not {name: n for name, n in lengths.items() if n > 10}
    assert ";" not in re.sub(r'"[^"\n]*"|#.*', "", text)  # one statement a line


def test_only_runs_one_task() -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", "1"], capture_output=True, encoding="utf-8", check=True
    )
    assert re.findall(r"^(\d+)\. ", run.stdout, re.M) == ["1"]
    assert "equal to the formula within" in run.stdout


def test_a_wrong_result_raises() -> None:
    x = torch.zeros(2, 3)
    assert hour.distance(x, x) == "within 0e+00"
    for wrong in (x + 2e-5, x + torch.nan, x[:1]):
        with pytest.raises(AssertionError):
            hour.distance(wrong, x)


def test_the_formula_is_that_of_pytorch() -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 4)
    keep, bias = torch.rand(2, 1, 5, 7) < 0.7, torch.randn(5, 7)
    keep[..., 0] = True
    added = bias.masked_fill(~keep, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, added, enable_gqa=True)
    torch.testing.assert_close(hour.formula(q, k, v, keep, bias), expected)


def test_pictures(folder: Path) -> None:
    hour.heat_maps()
    assert (folder / "recorded.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "chinese.svg").read_text(encoding="utf-8")
    assert all(svg.count(f">{token}</text>") == 2 for token in "天上有明月")  # a row and a column


def test_heat_maps_without_the_gallery(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "regard_gallery.models", None)
    model, _ = hour.bert()
    assert model.config.hidden_size == 96
    assert "recorded weights within" in hour.heat_maps()


# Commands


def commands() -> dict[str, Any]:
    from typer.main import get_command

    from regard.cli._app import app

    found: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return {name: command for name, command in found.items() if not command.hidden}


def test_every_command_has_a_quick_run() -> None:
    assert commands().keys() <= hour.QUICK.keys()


def test_every_argument_of_every_command_is_explained() -> None:
    for name, command in commands().items():
        for parameter in command.params:
            assert len((parameter.help or "").split()) >= 2 or parameter.name == "help", (
                name,
                parameter.name,
            )


def test_a_command_that_fails_raises() -> None:
    with pytest.raises(RuntimeError, match="regard cost --heads 0: exit 2"):
        hour.run_command(["cost", "--heads", "0"])


# Help

DOCUMENTED = (
    regard.attention, regard.linear_attention, KVCache, KVCache.attend, nn.Attention, nn.Attention.forward,
    nn.LatentAttention, see.heatmap, see.capture, regard.cost.table,
)  # fmt: skip


@pytest.mark.parametrize("function", DOCUMENTED, ids=lambda x: x.__qualname__)
def test_every_argument_is_explained(function: Any) -> None:
    """The docstring has a line for each parameter, and an explanation after the colon."""
    text = inspect.getdoc(function) or ""
    for name in inspect.signature(function).parameters.keys() - {"self"}:
        explained = re.search(rf"^    (?:\w+, )*{name}(?:, \w+)*: (.+(?:\n {{8}}.+)*)", text, re.M)
        assert explained, f"{function.__qualname__} does not explain {name}"
        assert len(explained[1].split()) >= 3, explained[0]


def test_an_argument_without_an_explanation_raises() -> None:
    def silent(loud: int, quiet: int) -> None:
        """Does nothing.

        Args:
            loud: an argument with an explanation.
        """

    with pytest.raises(AssertionError, match=r"help\(silent\) does not explain quiet"):
        hour.explanations(silent)


# Mistakes

OF_CALLS = (regard.attention, nn.Attention, nn.Stack.forward, KVCache.attend, see.heatmap)
PARAMETERS = {name for function in OF_CALLS for name in inspect.signature(function).parameters}


def test_there_are_at_least_ten_mistakes() -> None:
    assert len({mistake.typed for mistake in hour.MISTAKES}) >= 10


@pytest.mark.parametrize("mistake", hour.MISTAKES, ids=lambda x: x.typed)
def test_a_mistake_is_answered(mistake: Any) -> None:
    """The message begins with the argument or with a word that was typed, and says what works."""
    with torch.no_grad():
        message = hour.answer(mistake, hour.names_in_mistakes()).partition("\n")[2]
    (argument,) = re.findall(r"\A(\w+)[^:]*:", message)
    assert argument in PARAMETERS | set(re.findall(r"\w+", mistake.typed))
    assert mistake.write in message
    assert len(message) < 400


def test_an_answer_that_does_not_help_raises() -> None:
    names = hour.names_in_mistakes()
    for wrong in (
        hour.Mistake("masks.Window(4)", "chunked(4)", "masks.sliding(4)"),
        hour.Mistake("masks.sliding(4)", "sliding", "masks.sliding(4)"),
    ):
        with pytest.raises(AssertionError, match="expected '"):
            hour.answer(wrong, names)
