"""Checks docs/notes.md: every row is there, every test exists, every quick command runs."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from support import HAVE_CORE, ROOT
from support.scripts import load_script

pytest.importorskip("regard_gallery")
typer = pytest.importorskip("typer")

QUICK, LIMIT = 3, 20  # seconds: run by `make test`; run by `make test-all`


NOTES = load_script("tools/docs/notes.py")
ROWS = [(section, row) for section, rows in NOTES.rows().items() for row in rows]
SECONDS = {command: row.get("seconds", 0) for _, row in ROWS for command in NOTES.commands_of(row)}


def test_every_row_is_there_once() -> None:
    numbers = {section: [row["number"] for row in rows] for section, rows in NOTES.rows().items()}
    assert numbers == {"A": [*range(1, 41)], "B": [*range(1, 41)], "D": [*range(1, 9)]}


def test_the_page_is_written_from_the_table() -> None:
    assert NOTES.page() == NOTES.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("section", "row"), ROWS, ids=[f"{s}{r['number']}" for s, r in ROWS])
def test_a_row_has_an_answer_that_something_shows(section: str, row: dict[str, Any]) -> None:
    assert NOTES.answer_of(row)
    assert NOTES.shown_by(section, row)
    path, _, name = row.get("test", "").partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def cases() -> list[Any]:
    """Returns a case for each command that takes less than LIMIT seconds."""
    return [
        pytest.param(command, marks=[pytest.mark.full] * (seconds > QUICK))
        for command, seconds in SECONDS.items()
        if seconds < LIMIT
    ]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
@pytest.mark.parametrize("command", cases())
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(command)
    if program == "python":
        monkeypatch.setattr("sys.argv", [str(ROOT / arguments[0])])
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
        return
    from typer.testing import CliRunner

    from regard.cli._app import make_app

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 0, result.output
    assert result.output
