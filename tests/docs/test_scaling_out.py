"""Checks docs/scaling-out.md: its tables are what its commands print, its numbers are in the tables."""

from __future__ import annotations

import re

import pytest

from support import ROOT
from support.scripts import load_script

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

SCRIPT = load_script("tools/docs/scaling_out.py")
PAGE = (ROOT / "docs" / "scaling-out.md").read_text(encoding="utf-8")


COMMANDS = {command: text for _, command, text, _ in SCRIPT.BLOCK.findall(PAGE)}
SLOW = re.compile(r"4096 --tokens 1\d{7}")  # the same ranks as the first command, more tokens


def test_every_command_has_its_output() -> None:
    assert len(COMMANDS) == PAGE.count("\nregard cost ") == 5


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[pytest.mark.full] if SLOW.search(c) else []) for c in COMMANDS]
)
def test_the_tables_are_the_output_of_the_commands(command: str) -> None:
    assert SCRIPT.output(command) == COMMANDS[command]


def test_the_page_is_rewritten() -> None:
    page = "```sh\nregard cost --ranks 2 --tokens 99\n```\n\n```text\nold\n```\n"
    written = SCRIPT.written(page)
    assert "old" not in written
    assert "    2  ring" in written
    with pytest.raises(RuntimeError, match="--ranks: expected integers"):
        SCRIPT.output("cost --ranks x")


def test_the_numbers_of_the_text_are_in_the_tables() -> None:
    tables = "".join(text for *_, text, _ in SCRIPT.BLOCK.findall(PAGE))
    section = PAGE.partition("## Where each wins")[2].partition("\n## ")[0]
    quoted = re.findall(r"([\d.,]+) (?:GB|s|messages)\b", section)
    assert len(quoted) >= 10
    assert [number for number in quoted if number not in tables.split() and f"{number}*" not in tables] == []


def test_every_method_is_drawn() -> None:
    costs = {name: SCRIPT.measured(mask)[:12] for name, mask in SCRIPT.MASKS.items()}
    for axes in SCRIPT.draw(costs, "black", "grey").axes:
        names = [line.get_label() for line in axes.lines]
        assert names == ["ulysses", "ring", "gather", "usp", "computing alone"]
